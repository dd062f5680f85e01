"""Gradients of distributed experts that are reduced once a step, and those of the rest on each microbatch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.expert_parallel.apply import is_experts
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.parallelizer import parallelize
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.compare import GradientRecorder, step_errors
from automodel_cli.training.stages import SingleStage
from automodel_cli.training.step import train_step
from tests.dist.harness import launch
from tests.dist.parity import FSDP2, Case, reference, step_batches, tiny_part
from tests.errors import raises

_MICROBATCHES = 3
_EP2 = MeshConfig(ep_size=2)


class _Reductions(TorchDispatchMode):
    """Elements of each reduce-scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._schema.name == "c10d::_reduce_scatter_base_":
            self.sizes.append(args[1].numel())
        return func(*args, **(kwargs or {}))


def _steps(rank, world):
    """Of each value: errors of a step against one process, and reduce-scatters of experts and of the rest per layer."""
    mesh = build_mesh(_EP2.resolve(world), "cpu")
    of_ranks = step_batches(Case("qwen3_moe", num_microbatches=_MICROBATCHES), mesh.dp_size)
    want = reference("qwen3_moe", [batch for batches in of_ranks for batch in batches])
    found = {}
    for deferred in (False, "experts", True):
        part = tiny_part("qwen3_moe")
        module = parallelize(part, mesh, replace(FSDP2, defer_fsdp_grad_sync=deferred))
        experts = [module for module in part.modules() if is_experts(module)]
        size = sum(param.to_local().numel() for param in experts[0].parameters()) * 2  # two ranks share an expert
        recorder = GradientRecorder(part)
        with _Reductions() as reductions:
            result = train_step(SingleStage(module), of_ranks[mesh.dp_rank], SFT(), recorder, mesh, max_grad_norm=None)
        num_experts = reductions.sizes.count(size) / len(experts)
        others = len(reductions.sizes) - reductions.sizes.count(size)
        found[deferred] = step_errors(want, result, recorder.gradients), num_experts, others
    return found


@pytest.mark.slow
def test_experts_are_reduced_once_a_step_and_the_rest_on_each_microbatch():
    found = launch(_steps, 4)
    for errors, *_ in found.values():
        assert errors.within_rounding(), errors
    assert [of_experts for _, of_experts, _ in found.values()] == [_MICROBATCHES, 1, 1]
    every, experts_late, once = (others for _, _, others in found.values())
    assert every == experts_late == _MICROBATCHES * once


def test_the_value_needs_distributed_experts():
    config = FSDP2Config(defer_fsdp_grad_sync="experts")
    config.check_mesh(_EP2)
    with raises(ConfigError, "no_effect", keys=("parallelizer.defer_fsdp_grad_sync", "mesh.ep_size"), values=(1,)):
        config.check_mesh(MeshConfig())
    assert config.exact(()).defer_fsdp_grad_sync is False
    assert config.exact(("ep",)).defer_fsdp_grad_sync == "experts"
    with pytest.raises(ConfigError):
        FSDP2Config(defer_fsdp_grad_sync="never")
