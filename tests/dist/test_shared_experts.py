"""What runs while tokens are on their way: the order in which a rank sends, waits and computes. That results and
gradients are those of one process is in `test_expert_parallel`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from automodel_cli.distributed.expert_parallel import token_dispatcher
from automodel_cli.distributed.expert_parallel.grouped_mlp import GatedExperts
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.objectives.sft import SFT
from automodel_cli.training.step import train_step
from tests.dist.harness import launch
from tests.dist.parity import FSDP2
from tests.dist.test_expert_parallel import Case, Recorder, batches_of, build_stages

EP2 = MeshConfig(ep_size=2)
SEND, WAIT, SHARED, BACK, WEIGHT = "send", "wait", "shared", "shared backward", "gradient of a weight"


@dataclass
class _Logged:
    work: Any
    log: list[str]

    def wait(self) -> None:
        self.log.append(WAIT)
        self.work.wait()


def _order(rank: int, world: int, mode: bool | str) -> list[str]:
    """One step of a layer with shared experts; exchanges of tokens only."""
    mesh = build_mesh(EP2.resolve(world), "cpu")
    config = replace(FSDP2, activation_checkpointing=mode)
    stages = build_stages(Case("deepseek_v3", EP2, config=config), mesh)
    log: list[str] = []
    exchange, weight_gradient = token_dispatcher.exchange, GatedExperts.weight_gradient

    def logged(rows: Any, *args: Any) -> Any:
        arriving = exchange(rows, *args)
        if rows.ndim < 2:
            return arriving
        log.append(SEND)
        return replace(arriving, work=_Logged(arriving.work, log))

    def gradient(self: GatedExperts, *args: Any) -> Any:
        log.append(WEIGHT)
        return weight_gradient(self, *args)

    def computed(module: Any, args: Any, output: Any) -> None:
        log.append(SHARED)
        if output.requires_grad:
            output.register_hook(lambda grad: log.append(BACK))

    (shared,) = [module for name, module in stages.parts[0].named_modules() if name.endswith("shared_experts")]
    shared.gate_proj.register_forward_hook(computed)
    token_dispatcher.exchange, GatedExperts.weight_gradient = logged, gradient
    train_step(stages, batches_of(mesh.dp_rank, 1), SFT(), Recorder(stages.parts), mesh, max_grad_norm=None)
    return log


@pytest.mark.parametrize("mode", [False, "full"])
def test_shared_experts_and_gradients_of_weights_run_while_tokens_travel(mode: bool | str) -> None:
    """Recomputed, the layer is run again while the first gradients are on their way."""
    again = [] if mode is False else [SHARED]
    assert launch(_order, 2, mode) == [
        *(SEND, WAIT),  # tokens to their experts
        *(SEND, SHARED, WAIT),  # results back
        *(SEND, *again, BACK, WAIT),  # gradients of results
        *(SEND, WEIGHT, WEIGHT, WAIT),  # gradients of tokens
    ]
