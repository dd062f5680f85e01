"""FSDP2 on units that one rank has for itself, against the same sums written out."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_layers import GradientCheckpointingLayer

from automodel_cli.distributed.strategies.fsdp2.sharding import fsdp2_strategy_parallelize
from tests.dist.harness import launch

_SIZE = 64


class _Passes(TorchDispatchMode):
    """Operators that pass over a whole weight, by name and dtype of what they write."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        onto_itself = name == "copy_" and args[0] is args[1]
        if isinstance(result, Tensor) and result.numel() == _SIZE**2 and not func.is_view and not onto_itself:
            self.seen[name, result.dtype] += 1
        return result


class _Layer(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(_SIZE, _SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer()])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def _inputs() -> list[Tensor]:
    return [torch.randn(5, _SIZE, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in (1, 2, 3)]


def _steps(rank, world):
    """Results and gradients of two steps of three microbatches, and the passes over the weight of the second one."""
    model = fsdp2_strategy_parallelize(_Model(), init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        results = []
        with _Passes() as passes:
            for i, x in enumerate(_inputs()):
                model.set_requires_gradient_sync(i == 2)
                results.append(model(x))
                results[-1].float().square().sum().backward()
        gradient = model.layers[0].weight.grad.to_local().clone()
        found.append(([result.detach() for result in results], gradient, passes.seen))
        optimizer.step()
    return found


def _written_out() -> list[tuple[list[Tensor], Tensor]]:
    weight, found = _Model().layers[0].weight.detach(), []
    for _ in range(2):
        total, results = torch.zeros_like(weight), []
        for x in _inputs():
            cast = weight.bfloat16().requires_grad_()
            results.append(x @ cast.t())
            results[-1].float().square().sum().backward()
            total += cast.grad
        found.append(([result.detach() for result in results], total))
        weight = weight - total
    return found


def test_a_unit_on_one_rank_casts_in_one_pass_and_sums_without_a_copy() -> None:
    steps = launch(_steps, 1)
    for (results, gradient, _), (wanted, total) in zip(steps, _written_out(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))
        assert torch.equal(gradient, total)
    (_, _, passes) = steps[1]
    casts = {key: n for key, n in passes.items() if key[0] in ("_to_copy", "copy_", "div", "clone")}
    assert casts == {
        ("copy_", torch.bfloat16): 3,  # a cast for each microbatch
        ("_to_copy", torch.float32): 1,  # the first gradient, which the others are added to
    }, casts
