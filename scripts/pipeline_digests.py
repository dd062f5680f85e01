"""Compare losses and gradients of all pipeline schedules between two releases of torch, bit by bit.

    OLD/bin/python scripts/pipeline_digests.py old.json      # in an environment with one release
    NEW/bin/python scripts/pipeline_digests.py new.json      # in an environment with another
    python scripts/pipeline_digests.py old.json new.json     # differences; exit status 1 if there are any

A row is a schedule on gloo ranks: alone, and with two data-parallel ranks under FSDP2 (on whole stages, on layers only,
in bfloat16 with float32 sums). The row `one process` shows whether the kernels of the two builds agree at all.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from tests.dist import pipeline_cases
from tests.dist.harness import launch
from tests.dist.pipeline_cases import SCHEDULES, Case

_NESTED = (("parallelize", "layers"), ("patch_stage_backward_maybe_with_nosync", True))
_CASES = {
    "alone": [Case(schedule, "qwen3_moe", "variable") for schedule in SCHEDULES],
    "fsdp2": [Case(schedule, "qwen3", "tied", 2, (("parallelize", "fsdp"),)) for schedule in SCHEDULES],
    "layers": [Case(schedule, "llama", "masked", 2, _NESTED) for schedule in SCHEDULES],
    "bfloat16": [Case(schedule, "llama", "variable", 2, (("parallelize", "mixed"),)) for schedule in SCHEDULES],
}


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def _run(rank: int, world: int, cases: list[Case]) -> list[dict[str, str]]:
    meshes = {dp: build_mesh(MeshConfig(pp_size=2, dp_size=dp).resolve(world), "cpu") for dp in {c.dp for c in cases}}
    return [_row(case, meshes[case.dp]) for case in cases]


def _row(case: Case, mesh: Any) -> dict[str, str]:
    count = 4
    pipeline = pipeline_cases.make_pipeline(case, mesh, count)
    batches = [pipeline_cases.make_batches(case, count, step, mesh.dp_rank) for step in range(2)]
    loss = pipeline_cases.loss_over(64.0)
    first = pipeline.forward_backward(batches[0], loss)
    values = pipeline.forward(batches[1], lambda output, batch: output.logprobs_BT.detach())
    losses = mesh.sum_over(mesh.loss, torch.stack([first, pipeline.forward_backward(batches[1], loss)]))
    gradients = pipeline_cases.gather_gradients(pipeline.parts)
    assert all(grad.isfinite().all() for grad in gradients.values())
    dist.barrier()
    return {
        "loss": _digest({"loss": losses}),
        "forward": _digest({str(i): value for i, value in enumerate(values)}),
        "gradients": _digest(gradients),
    }


def main(paths: list[str]) -> int:
    if len(paths) == 1:
        reference = pipeline_cases.one_process(Case("none"), 4, 4)
        digests = {"torch": torch.__version__, "one process": {"gradients": _digest(reference.gradients)}}
        for name, cases in _CASES.items():
            rows = launch(_run, 2 * cases[0].dp, cases, timeout=600)
            digests |= {f"{name}: {case.schedule}": row for case, row in zip(cases, rows, strict=True)}
        Path(paths[0]).write_text(json.dumps(digests, indent=1))
        return 0
    old, new = (json.loads(Path(path).read_text()) for path in paths)
    versions = [digests.pop("torch") for digests in (old, new)]
    wrong = [f"{row}, {what}" for row in old for what in old[row] if old[row][what] != new[row][what]]
    rows = sum(len(digests) for digests in old.values())
    print(f"torch {versions[0]} and {versions[1]}: {rows - len(wrong)} of {rows} digests equal", *wrong, sep="\n  ")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
