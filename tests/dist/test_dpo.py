"""Preference and policy-gradient objectives on the real step: every layout against the library's model in one process;
metrics, microbatches, padding and the step-0 identities through `train_step` and `evaluate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.objectives import dpo
from automodel_cli.objectives.dpo import DPO
from automodel_cli.objectives.grpo import GRPO
from automodel_cli.objectives.kto import KTO
from automodel_cli.parity.batches import step_batches
from automodel_cli.parity.cases import FP32, Case
from automodel_cli.parity.compare import GradientRecorder, build_parity_stages, run_rows
from automodel_cli.parity.reference import Original
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.training.stages import Stages
from automodel_cli.training.step import train_step
from automodel_cli.training.validate import validate
from tests import tiny
from tests.dist.harness import launch, launch_all
from tests.marks import slow
from tests.rounding import tolerance

OBJECTIVES: dict[str, Any] = {
    "dpo": DPO(nll_weight=0.5),
    "ipo": DPO(loss="ipo", beta=0.5),
    "kto": KTO(undesirable_weight=2.0),
    # a term that does not cancel: advantages alone sum to nearly 0, and the error of a sum near 0 is only rounding
    "grpo": GRPO(
        kl_coef=0.1,
        clip_high=0.28,
        sampler_correction="truncate",
        sampler_correction_clip_max=2.0,
        positive_nll_coef=0.2,
        entropy_coef=0.01,
    ),
    "gspo": GRPO(importance_sampling_level="sequence", loss_aggregation="sequence"),
}


def row(objective: Any, *, dp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, schedule: str = "1f1b") -> Case:
    mesh = MeshConfig(dp_size=dp, pp_size=pp, cp_size=cp, ep_size=ep)
    pipeline = PipelineConfig(schedule=schedule) if pp > 1 else None
    return Case(mesh, FSDP2Config(mp_policy=FP32), pipeline, objective=objective)


def layouts(objective: Any) -> list[Case]:
    """Two ranks each, packed and with padding."""
    rows = [row(objective, dp=2), row(objective, pp=2), row(objective, cp=2), row(objective, pp=2, schedule="zbv")]
    return [replace(r, num_microbatches=4) for r in (*rows, *(replace(r, packed=False) for r in rows[:2]))]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Original]:
    folder = tmp_path_factory.mktemp("originals")

    def write(family: str, name: str, kinds: Sequence[bool] = (True, False)) -> Original:
        path = folder / f"{family}-{name}"
        if not path.exists():
            Original.write(path, tiny.build_hf(family), OBJECTIVES[name], kinds=kinds, counts=(4,))
        return Original(path)

    return write


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "kto", *slow("ipo", "grpo", "gspo")])  # GRPO by default: test_grpo
def test_same_numbers_as_one_process(original, name):
    rows = layouts(OBJECTIVES[name])
    for which, errors in zip(rows, launch(run_rows, 2, original("llama", name), rows), strict=True):
        assert errors.within_rounding(), f"{which}: {errors}"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", *slow("grpo")])
def test_experts_over_ranks(original, name):
    rows = [replace(row(OBJECTIVES[name], dp=2, ep=2), num_microbatches=4)]
    (errors,) = launch(run_rows, 2, original("qwen3_moe", name, (True,)), rows)
    assert errors.within_rounding(), errors


def forget_a_side(batches: list[Batch]) -> list[Batch]:
    """The rejected response of each pair compared with itself."""
    return [replace(b, extra={**b.extra, "pairs_P2": b.extra["pairs_P2"][:, :1].expand(-1, 2)}) for b in batches]


def mean_of_microbatches(batches: list[Batch]) -> list[Batch]:
    """Each microbatch divided by its own pairs, as peers do."""
    whole = DPO.__call__

    def own_mean(self, output, batch):
        return whole(self, output, batch) / self.weight(batch).clamp(min=1)

    dpo.DPO.__call__ = own_mean  # type: ignore[method-assign]
    return batches


@pytest.mark.parametrize("sabotage", [forget_a_side, *slow(mean_of_microbatches)])
def test_sabotage_is_noticed(original, sabotage):
    which = replace(row(OBJECTIVES["dpo"], dp=2), num_microbatches=4)
    (errors,) = launch(run_rows, 2, original("llama", "dpo"), [which], sabotage)
    assert errors.gradient > 1e-3, f"blind to {sabotage.__name__}: {errors}"


# What the step reports, and how the batch is cut up


def merged(batches: Sequence[Batch], count: int) -> list[Batch]:
    """The same rows in `count` microbatches."""
    size = len(batches) // count
    return [_joined(batches[i * size : (i + 1) * size]) for i in range(count)]


def _joined(batches: Sequence[Batch]) -> Batch:
    documents = [0, *torch.tensor([b.num_documents for b in batches]).cumsum(0).tolist()]
    tokens = [0, *torch.tensor([b.input_ids_BT.numel() for b in batches]).cumsum(0).tolist()]
    columns = {name: [b.extra[name] for b in batches] for name in batches[0].extra}
    columns["pairs_P2"] = [pairs + first for pairs, first in zip(columns["pairs_P2"], documents, strict=False)]
    columns["kl_baseline_1"] = columns["kl_baseline_1"][:1]
    bounds = [b.cu_seqlens[:-1] + first for b, first in zip(batches, tokens, strict=False)]
    return Batch(
        input_ids_BT=torch.cat([b.input_ids_BT for b in batches]),
        labels_BT=torch.cat([b.labels_BT for b in batches]),
        position_ids_BT=torch.cat([b.position_ids_BT for b in batches]),
        cu_seqlens=torch.cat([*bounds, torch.tensor(tokens[-1:])]).int(),
        max_seqlen=max(b.max_seqlen for b in batches),
        row_ids_B=torch.cat([b.row_ids_B for b in batches]),
        extra={name: torch.cat(values) for name, values in columns.items()},
    )


def with_dummies(batches: list[Batch]) -> list[Batch]:
    """And two more microbatches without a label."""
    dummies = []
    for batch in batches[:2]:
        labels_BT = torch.full_like(batch.labels_BT, IGNORE_INDEX)
        extra = {**batch.extra, "pairs_P2": batch.extra["pairs_P2"][:0]}
        extra["desirable_S"] = torch.full_like(batch.extra["desirable_S"], -1)
        dummies.append(replace(batch, labels_BT=labels_BT, extra=extra))
    return [*batches, *dummies]


CUTS: dict[str, Callable[[list[Batch]], list[Batch]]] = {
    "as they are": list,
    "merged by two": lambda batches: merged(batches, 4),
    "all in one": lambda batches: merged(batches, 1),
    "with dummies": with_dummies,
}


def reported(rank: int, world: int, original: Original, which: Case, cut: str) -> dict[str, float]:
    """Everything a step and an evaluation report."""
    mesh = build_mesh(which.mesh.resolve(world), "cpu")
    every = CUTS[cut](step_batches(packed=True))
    share = len(every) // mesh.dp_size
    mine = every[mesh.dp_rank * share :][:share]
    stages = build_parity_stages(original, replace(which, num_microbatches=len(every)), mesh)
    before = validate(stages, mine, which.objective, mesh)
    result = train_step(stages, mine, which.objective, GradientRecorder(*stages.parts), mesh, max_grad_norm=None)
    assert result.loss.item() == pytest.approx(before.loss.item(), rel=1e-6)
    for name, value in before.metrics.items():
        assert result.metrics[name].item() == pytest.approx(value.item(), rel=1e-5, abs=1e-6), name
    numbers = {"loss": result.loss.item(), "norm": result.grad_norm.item()}
    return numbers | {name: value.item() for name, value in result.metrics.items()}


@pytest.mark.parametrize("name", ["dpo", *slow("grpo", "kto")])
def test_reports_do_not_depend_on_ranks_stages_or_microbatches(original, name):
    one = row(OBJECTIVES[name])
    (want,) = launch_all(reported, 1, original("llama", name), one, "as they are")
    assert all(math.isfinite(value) for value in want.values())
    others = [(1, one, cut) for cut in CUTS if cut != "as they are"]
    others += [(2, row(OBJECTIVES[name], dp=2), "with dummies"), (2, row(OBJECTIVES[name], pp=2), "as they are")]
    for world, which, cut in others:
        for got in launch_all(reported, world, original("llama", name), which, cut):
            assert got == pytest.approx(want, rel=2e-6, abs=2e-7), f"{which}, {cut}"


def _with_own_logprobs(stages: Stages, batches: list[Batch], name: str) -> list[Batch]:
    values = stages.forward(batches, lambda output, _: output.logprobs_BT)
    return [replace(b, extra={**b.extra, name: v}) for b, v in zip(batches, values, strict=True)]


def first_step(rank: int, world: int, original: Original) -> dict[str, float]:
    """Reference and old log-probs measured by the model itself, then one step of each objective."""
    which = row(DPO(), dp=world)
    mesh = build_mesh(which.mesh.resolve(world), "cpu")
    batches = step_batches(packed=True)[mesh.dp_rank :: world]
    stages = build_parity_stages(original, which, mesh)
    for name in ("ref_logprobs_BT", "old_logprobs_BT"):
        batches = _with_own_logprobs(stages, batches, name)
    numbers = {}
    for name, objective in {"dpo": DPO(), "grpo": GRPO()}.items():
        result = train_step(stages, batches, objective, GradientRecorder(*stages.parts), mesh, max_grad_norm=None)
        numbers[name] = result.loss.item()
        numbers |= {key: value.item() for key, value in result.metrics.items()}
    labelled = [b.labels_BT != IGNORE_INDEX for b in step_batches(packed=True)]
    advantages = [b.extra["advantages_BT"] for b in step_batches(packed=True)]
    total = sum(a[mask].sum() for a, mask in zip(advantages, labelled, strict=True))
    return {**numbers, "mean advantage": (total / sum(mask.sum() for mask in labelled)).item()}


@pytest.mark.parametrize("world", [1, 2])
def test_first_step_from_the_reference_is_ln_2_and_has_ratio_one(original, world):
    got = launch(first_step, world, original("llama", "dpo"))
    assert got["dpo"] == pytest.approx(math.log(2), abs=1e-6)
    assert got["rewards_margin"] == pytest.approx(0, abs=1e-6)
    assert got["probs_ratio_min"] == pytest.approx(1, abs=1e-6) and got["probs_ratio_max"] == pytest.approx(1, abs=1e-6)
    assert got["grpo"] == pytest.approx(-got["mean advantage"], abs=1e-6)
    assert got["clip_fraction"] == 0


def test_packed_and_padded_pairs_give_the_same_loss(tmp_path: Path):
    """The same pairs, one to a row and all in one row, through the same model."""
    assert launch(_packed_against_padded, 1, tmp_path / "model") <= tolerance()


def _packed_against_padded(rank: int, world: int, folder: Path) -> float:
    original = Original.write(folder, tiny.build_hf("llama"), DPO(), kinds=())
    mesh = build_mesh(MeshConfig(dp_size=1).resolve(1), "cpu")
    pairs = [[tiny.token_row(5 + i, seed=i), tiny.token_row(9 - i, seed=50 + i)] for i in range(4)]
    packed = replace(
        tiny.packed_batch([[document for pair in pairs for document in pair]]),
        extra={"pairs_P2": torch.arange(8).view(4, 2), "ref_logprobs_BT": torch.full((1, 56), -5.0)},
    )
    padded = tiny.packed_batch([[*pair, torch.zeros(6, dtype=torch.int64)] for pair in pairs])
    labels_BT = padded.labels_BT.clone()
    labels_BT[:, 14:] = IGNORE_INDEX
    pairs_P2 = torch.arange(12).view(4, 3)[:, :2]
    padded = replace(
        padded, labels_BT=labels_BT, extra={"pairs_P2": pairs_P2, "ref_logprobs_BT": torch.full((4, 20), -5.0)}
    )
    found = []
    for batch in (packed, padded):
        stages = build_parity_stages(original, row(DPO()), mesh)
        recorder = GradientRecorder(*stages.parts)
        result = train_step(stages, [batch], DPO(), recorder, mesh, max_grad_norm=None)
        found.append((result.loss.item(), recorder.gradients))
    (loss, gradients), (other_loss, other_gradients) = found
    return max(abs(loss - other_loss) / loss, tiny.gradient_error(gradients, other_gradients))
