"""Linear layers that add gradients in their products, against one process in float64 that autograd sums for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from automodel_cli.distributed.sharded_module import handle_of
from automodel_cli.distributed.strategies.fsdp2.config import FSDP2Config
from automodel_cli.distributed.strategies.fsdp2.sharding import fsdp2_strategy_parallelize
from automodel_cli.distributed.wgrad_fusion.linear import WgradFusedLinear, weight_sum_of
from automodel_cli.models.lm_head.fused_linear_logprobs import fused_scores
from automodel_cli.models.lm_head.scores import HeadKind, Settings
from tests.dist.harness import launch

_WIDTH, _ROWS, _VOCAB = 16, 6, 12


class _Layer(GradientCheckpointingLayer):
    """Three layers of one input, of which one is not used by every row count, and another reader of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 2 * _WIDTH, bias=False)
        self.unused, self.last = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.frozen = nn.Linear(_WIDTH, _WIDTH, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(x)
        self.unused(inner)
        gate, up = self.second(inner).chunk(2, -1)
        return x + self.last(torch.sigmoid(gate) * up + self.first(inner)) + inner * self.frozen(inner)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([_Layer(), _Layer()])
        self.head = nn.Linear(_WIDTH, _VOCAB, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        settings = Settings(HeadKind("plain"), chunk=4)
        scores = fused_scores(x.flatten(0, 1), self.head.weight, labels[:, None], settings, weight_sum_of(self.head))
        # so that the head sums in backward
        weights = torch.arange(1.0, len(labels) + 1, dtype=scores.logprobs_SN.dtype)
        return (scores.logprobs_SN[:, 0] * weights).sum()


def _data(rank: int, microbatch: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + microbatch)
    return torch.randn(2, _ROWS, _WIDTH, generator=generator), torch.randint(_VOCAB, (2 * _ROWS,), generator=generator)


def _wanted(world: int, count: int) -> dict[str, Tensor]:
    model = _Model().double()
    for rank in range(world):
        for microbatch in range(count):
            x, labels = _data(rank, microbatch)
            model(x.double().requires_grad_(), labels).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def _gradients(rank, world, recompute, param_dtype, reduce_dtype, count, every):
    config = FSDP2Config(activation_checkpointing=recompute, defer_fsdp_grad_sync=not every)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    model = fsdp2_strategy_parallelize(_Model(), mesh, policy, config=config)
    handle = handle_of(model)
    for microbatch in range(count):
        x, labels = _data(rank, microbatch)
        with handle.microbatch(microbatch == count - 1):
            model(x.requires_grad_(), labels).backward()
    assert all(type(m) is WgradFusedLinear for m in model.modules() if isinstance(m, nn.Linear))

    def whole(grad: Tensor) -> Tensor:
        return grad.full_tensor() if isinstance(grad, DTensor) else grad

    return {name: whole(param.grad) for name, param in model.named_parameters() if param.grad is not None}


_CASES = {
    "summed in float64": (False, None, torch.float64, 3, False, 1e-5),
    "recomputed": ("full", None, torch.float64, 3, False, 1e-5),
    "reduced on every microbatch": (False, None, torch.float64, 3, True, 1e-5),
    "one microbatch": (False, None, torch.float64, 1, False, 1e-5),
    "in one dtype": (False, None, None, 3, False, 1e-5),
    "bfloat16 summed in float32": (False, torch.bfloat16, torch.float32, 3, False, 0.1),
}


def _all_cases(rank, world):
    return {name: _gradients(rank, world, *case[:-1]) for name, case in _CASES.items()}


@pytest.fixture(scope="module")
def found():
    return launch(_all_cases, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", _CASES)
def test_products_that_add_give_the_gradients_of_one_process(found, name: str) -> None:
    count, tolerance = _CASES[name][3], _CASES[name][-1]
    wanted = _wanted(2, count)
    assert found[name].keys() == wanted.keys()
    for param, grad in found[name].items():
        error = (grad.double() - wanted[param]).norm() / wanted[param].norm()
        assert error <= tolerance, f"{param}: {error}"
