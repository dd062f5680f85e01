"""Linear layers that multiply in 8-bit floats, whole or cut over tensor parallelism.

The layer is torch's with another class: its parameters, their names and dtypes are what they were, so loading,
sharding, adapters, checkpoints and exports know nothing of it. Weights are cast at every use. Three products of T
tokens, I inputs and O outputs, each contracting what its operands share a scale over (`fp8`):

    y = x W^T (over I)      dx = dy W (over O)      dW = dy^T x (over T)

Where tensor parallelism cuts what a scale is shared by, the largest magnitude is taken over all its ranks, so that
every rank casts as one process would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Shard

from automodel_cli.config.warn import warn
from automodel_cli.distributed.float8.grouped_gemm import require_grouped
from automodel_cli.distributed.float8.quantization import Arithmetic, autocast_dtype, require_float8
from automodel_cli.distributed.fusion.compiled_regions import RegionCompiler


class Fp8Linear(nn.Linear):
    """A layer that `convert` has made; it is never constructed."""

    fp8: Arithmetic

    def forward(self, x: Tensor) -> Tensor:
        if self.fp8.paused:
            return super().forward(x)
        weight = self.weight
        dtype = autocast_dtype(x.device)
        if dtype is not None:
            x, weight = x.to(dtype), cast(nn.Parameter, weight.to(dtype))
        y = _over_tp(x, weight, self.fp8) if isinstance(weight, DTensor) else _product(x, weight, self.fp8, _WHOLE)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.fp8.recipe.name}"


def convert_to_float8(linear: nn.Linear, arithmetic: Arithmetic) -> None:
    """Let a linear layer multiply so from now on, in place."""
    linear.__class__ = Fp8Linear
    linear.fp8 = arithmetic  # type: ignore[assignment]


def exclude_indivisible(part: nn.Module, device: torch.device, fuser: RegionCompiler | None) -> None:
    """After tensor parallelism has cut the layers: leave those whose share does not divide, and let casts run as
    `fuser` says. Raises ConfigError on a device without 8-bit products, of experts too."""
    layers = [module for module in part.modules() if isinstance(module, Fp8Linear)]
    left: Counter[str] = Counter()
    for module in part.modules():
        if (fp8 := vars(module).get("fp8")) is not None and not fp8.emulate:
            (require_float8 if isinstance(module, Fp8Linear) else require_grouped)(device, fp8.recipe)
    for layer in layers:
        shape = layer.weight.to_local().shape if isinstance(layer.weight, DTensor) else layer.weight.shape
        if any(size % layer.fp8.recipe.multiple for size in shape):
            layer.__class__ = nn.Linear  # type: ignore[assignment]
            left[f"{shape[1]} x {shape[0]}"] += 1
    if fuser is not None:
        for arithmetic in _arithmetics([part]):
            arithmetic.fuse(fuser)
    if left:
        sizes = ", ".join(f"{count} of {size}" for size, count in left.items())
        warn(
            "precision_loss",
            "Linear layers whose local size is not a multiple of %d do not compute in float8 (%s). Results differ from "
            "one process",
            layers[0].fp8.recipe.multiple,
            sizes,
        )


@contextmanager
def paused(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, converted layers compute what their weights say, as whoever loads an export does."""
    of_parts = _arithmetics(parts)
    for arithmetic in of_parts:
        arithmetic.paused = True
    try:
        yield
    finally:
        for arithmetic in of_parts:
            arithmetic.paused = False


def _arithmetics(parts: Sequence[nn.Module]) -> list[Arithmetic]:
    """Of linear layers and of experts; many share one."""
    found = [vars(module).get("fp8") for part in parts for module in part.modules()]
    return list({id(fp8): fp8 for fp8 in found if isinstance(fp8, Arithmetic)}.values())


class _Cut(NamedTuple):
    """Which dim of the weight tensor parallelism cuts, if any: 0 outputs, 1 inputs."""

    dim: int | None = None
    group: dist.ProcessGroup | None = None

    def of_weight(self, by_row: bool, *, turned: bool) -> dist.ProcessGroup | None:
        """The group over which what shares a scale is cut."""
        shared = 0 if turned else 1
        return self.group if not by_row or self.dim == shared else None

    def of_features(self, dim: int, by_row: bool, *, turned: bool) -> dist.ProcessGroup | None:
        """The same for tokens' inputs (`dim` 1) or gradients of their outputs (`dim` 0)."""
        return self.group if self.dim == dim and not (by_row and turned) else None


_WHOLE = _Cut()


def _over_tp(x: Tensor, weight: DTensor, fp8: Arithmetic) -> Tensor:
    """Column-parallel: whole inputs, a share of outputs. Row-parallel: a share of inputs, a summand of the outputs."""
    mesh, (placement,) = weight.device_mesh, weight.placements
    assert isinstance(x, DTensor) and isinstance(placement, Shard), f"a weight placed as {placement}"
    by_outputs = placement.dim == 0
    local_x = x.to_local(grad_placements=[Partial()] if by_outputs else x.placements)
    local_w = weight.to_local(grad_placements=[placement])
    local_y = _product(local_x, local_w, fp8, _Cut(placement.dim, mesh.get_group()))
    return DTensor.from_local(local_y, mesh, [Shard(-1) if by_outputs else Partial()], run_check=False)


def _product(x: Tensor, weight_OI: Tensor, fp8: Arithmetic, cut: _Cut) -> Tensor:
    y_TO: Tensor = _Linear.apply(x.flatten(0, -2), weight_OI, fp8, cut)
    return y_TO.view(*x.shape[:-1], len(weight_OI))


class _Linear(torch.autograd.Function):
    """Keeps what torch's linear layer keeps: inputs and weight in the precision they come in, each only where a
    gradient needs it."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, fp8: Arithmetic, cut: _Cut) -> Tensor:
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x_TI if wants_weight else None, weight_OI if wants_x else None)
        ctx.fp8, ctx.cut, ctx.dtype = fp8, cut, weight_OI.dtype
        by_row = fp8.recipe.by_row
        x = fp8.operand(x_TI, group=cut.of_features(1, by_row, turned=False))
        weight = fp8.operand(weight_OI, group=cut.of_weight(by_row, turned=False))
        return fp8.product(x, weight, x_TI.dtype, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI = ctx.saved_tensors
        fp8, cut, recipe = ctx.fp8, ctx.cut, ctx.fp8.recipe
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        grad_x = grad_weight = None
        if wants_x:
            by_row = recipe.by_row and not recipe.exact_weight_gradient
            weight = fp8.operand(weight_OI, turned=True, by_row=by_row, group=cut.of_weight(by_row, turned=True))
            grad = fp8.operand(grad_TO, recipe.gradient, group=cut.of_features(0, recipe.by_row, turned=False))
            grad_x = fp8.product(grad, weight, grad_TO.dtype)
        if wants_weight and recipe.exact_weight_gradient:
            grad_weight = grad_TO.t() @ x_TI
        elif wants_weight:
            grad = fp8.operand(
                grad_TO, recipe.gradient, turned=True, group=cut.of_features(0, recipe.by_row, turned=True)
            )
            x = fp8.operand(x_TI, turned=True, group=cut.of_features(1, recipe.by_row, turned=True))
            grad_weight = fp8.product(grad, x, ctx.dtype)
        return grad_x, grad_weight, None, None
