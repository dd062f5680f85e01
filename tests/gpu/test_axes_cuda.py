"""Every axis that one part can have, two ranks on one GPU over gloo, against one process on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.parallelizer import parallelize
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.compare import Errors, GradientRecorder, step_errors
from automodel_cli.training.stages import SingleStage
from automodel_cli.training.step import train_step
from tests.dist.harness import launch
from tests.dist.parity import FSDP2, Case, reference, step_batches, tiny_part
from tests.gpu.staged import messages_through_the_host

CASES = {
    "fsdp2": Case("qwen3"),
    "tp2": Case("llama", mesh=MeshConfig(tp_size=2)),
    "cp2": Case("llama", mesh=MeshConfig(cp_size=2)),
    "ring2": Case("llama", mesh=MeshConfig(cp_size=2), config=replace(FSDP2, context_parallel="ring")),
    "ep2": Case("qwen3_moe", mesh=MeshConfig(ep_size=2)),
}


def one_step(rank: int, world: int, case: Case, device: str) -> Errors:
    """The real step with every rank on the same device, in float32."""
    if device == "cuda":
        torch.cuda.set_device(0)
        torch.backends.cuda.matmul.allow_tf32 = False
    mesh = build_mesh(case.mesh.resolve(world), device)
    of_ranks = step_batches(case, mesh.dp_size)
    want = reference(case.family, [batch for batches in of_ranks for batch in batches])
    part = tiny_part(case.family).to(device)
    assert case.config is not None
    stages, recorder = SingleStage(parallelize(part, mesh, case.config)), GradientRecorder(part)
    with messages_through_the_host():
        result = train_step(stages, of_ranks[mesh.dp_rank], SFT(), recorder, mesh, max_grad_norm=None)
    return step_errors(want, result, {name: grad.cpu() for name, grad in recorder.gradients.items()})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("axis", CASES)
def test_two_ranks_on_one_gpu_give_the_gradients_of_one_process(axis: str):
    errors = launch(one_step, 2, CASES[axis], "cuda")
    assert errors.within(1e-4), errors
