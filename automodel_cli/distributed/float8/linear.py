"""Linear layers that compute in float8, unsharded or sharded by tensor parallelism.

The layer is torch's with another class. Names, dtypes and values of parameters do not change, so loading, sharding,
adapters, checkpoints and exports need no special case. Weights are cast at every use. Each of the three GEMMs casts its
operands along the contracted dimension (`quantization`)::

    y = x W^T (contracts I)      dx = dy W (contracts O)      dW = dy^T x (contracts T)

If tensor parallelism shards the dimension of a scale, the maximum is taken over all its ranks. Every rank then casts as
one process would.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from automodel_cli.config.warn import warn
from automodel_cli.distributed.float8.grouped_gemm import require_grouped
from automodel_cli.distributed.float8.quantization import Arithmetic, autocast_dtype, require_float8
from automodel_cli.distributed.float8.token_gather import GatheredInput, OutputGradient, gathered_of
from automodel_cli.distributed.fusion.compiled_regions import RegionCompiler
from automodel_cli.distributed.sharded_linear import linear_over_tp
from automodel_cli.distributed.tensors import to_local
from automodel_cli.distributed.torch_compat import wanted
from automodel_cli.distributed.typed_torch import Ctx, Function, set_attributes


class Fp8Linear(nn.Linear):
    """Created by `convert_to_float8`, never constructed."""

    fp8: Arithmetic

    def forward(self, x: Tensor) -> Tensor:
        if self.fp8.paused:
            return super().forward(x)
        weight, gathered = self.weight, gathered_of(x)
        dtype = autocast_dtype(x.device)
        if dtype is not None:
            x, weight = x.to(dtype), cast(nn.Parameter, weight.to(dtype))
        if isinstance(weight, DTensor):
            y = _over_tp(x, weight, self.fp8, gathered)
        else:
            y = _matmul(x, weight, self.fp8, _UNSHARDED)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fp8={self.fp8.recipe.name}"


def convert_to_float8(linear: nn.Linear, arithmetic: Arithmetic) -> None:
    """Compute this linear layer in float8 from now on, in place."""
    linear.__class__ = Fp8Linear
    set_attributes(linear, fp8=arithmetic)


def exclude_indivisible(part: nn.Module, device: torch.device, fuser: RegionCompiler | None) -> None:
    """Exclude sharded layers whose local size does not divide, and compile the casts with `fuser`.

    Call after tensor parallelism. Raises ConfigError if the device does not support the float8 GEMMs of linear layers
    or experts.
    """
    layers = [module for module in part.modules() if isinstance(module, Fp8Linear)]
    excluded: Counter[str] = Counter()
    for module in part.modules():
        if (fp8 := vars(module).get("fp8")) is not None and not fp8.emulate:
            (require_float8 if isinstance(module, Fp8Linear) else require_grouped)(device, fp8.recipe)
    for layer in layers:
        shape = to_local(layer.weight).shape
        if any(size % layer.fp8.recipe.multiple for size in shape):
            layer.__class__ = nn.Linear  # type: ignore[assignment]
            excluded[f"{shape[1]} x {shape[0]}"] += 1
    if fuser is not None:
        for arithmetic in _arithmetics([part]):
            arithmetic.fuse(fuser)
    if excluded:
        sizes = ", ".join(f"{count} of {size}" for size, count in excluded.items())
        warn(
            "precision_loss",
            "Linear layers whose local size is not a multiple of %d do not compute in float8 (%s). Results differ from "
            "one process",
            layers[0].fp8.recipe.multiple,
            sizes,
        )


def arithmetic_of(layers: Sequence[nn.Module]) -> Arithmetic | None:
    """Return the arithmetic of layers that all compute in float8 at present, or None."""
    of_layers = _arithmetics(layers)
    all_compute = all(isinstance(layer, Fp8Linear) and not layer.fp8.paused for layer in layers)
    return of_layers[0] if all_compute and len(of_layers) == 1 else None


@contextmanager
def paused(parts: Sequence[nn.Module]) -> Iterator[None]:
    """Compute converted layers in their original precision inside this context, as a loaded export does."""
    of_parts = _arithmetics(parts)
    for arithmetic in of_parts:
        arithmetic.paused = True
    try:
        yield
    finally:
        for arithmetic in of_parts:
            arithmetic.paused = False


def _arithmetics(parts: Sequence[nn.Module]) -> list[Arithmetic]:
    """Return the arithmetics of linear layers and experts. Many layers share one."""
    candidates = [vars(module).get("fp8") for part in parts for module in part.modules()]
    return list({id(fp8): fp8 for fp8 in candidates if isinstance(fp8, Arithmetic)}.values())


class _Sharding(NamedTuple):
    """Weight dimension that tensor parallelism shards (0 outputs, 1 inputs), or None."""

    dim: int | None = None
    group: dist.ProcessGroup | None = None

    def of_weight(self, by_row: bool, *, transposed: bool) -> dist.ProcessGroup | None:
        """Return the group over which the dimension of a weight scale is sharded."""
        # y = x W^T sums over inputs (dim 1), dx = dy W over outputs (dim 0). A scale per row belongs to values along
        # the summed dimension. If tensor parallelism shards that dimension, the maximum of a row is a maximum over
        # ranks.
        shared = 0 if transposed else 1
        return self.group if not by_row or self.dim == shared else None

    def of_features(self, dim: int, by_row: bool, *, transposed: bool) -> dist.ProcessGroup | None:
        """Return the same for inputs of tokens (`dim` 1) or gradients of outputs (`dim` 0)."""
        return self.group if self.dim == dim and not (by_row and transposed) else None


_UNSHARDED = _Sharding()


def _over_tp(x: Tensor, weight: DTensor, fp8: Arithmetic, gathered: GatheredInput | None) -> Tensor:
    gradient = OutputGradient(fp8)

    def compute(local_x: Tensor, local_w: Tensor, placement: Shard, mesh: DeviceMesh) -> Tensor:
        return _matmul(local_x, local_w, fp8, _Sharding(placement.dim, mesh.get_group()), gathered, gradient)

    y = linear_over_tp(x, weight, compute)
    set_attributes(y, output_gradient=gradient)
    return y


def _matmul(
    x: Tensor,
    weight_OI: Tensor,
    fp8: Arithmetic,
    sharding: _Sharding,
    gathered: GatheredInput | None = None,
    gradient: OutputGradient | None = None,
) -> Tensor:
    y_TO: Tensor = _Linear.apply(x.flatten(0, -2), weight_OI, fp8, sharding, gathered, gradient)
    return y_TO.view(*x.shape[:-1], len(weight_OI))


class _Linear(Function):
    """Linear function in float8. Saves inputs and weight in their own precision, as torch's does, if gradients need
    them.

    Only the shape of `x_TI` is read if `gathered` has its casts. The same holds for the gradient of the output.
    """

    @staticmethod
    def forward(
        ctx: Ctx,
        x_TI: Tensor,
        weight_OI: Tensor,
        fp8: Arithmetic,
        sharding: _Sharding,
        gathered: GatheredInput | None,
        gradient: OutputGradient | None,
    ) -> Tensor:
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        # Not the float8 casts: backward needs them along the other dimension, and with other scales.
        saved: Sequence[Tensor] = (x_TI,) if gathered is None else gathered.saved
        ctx.save_for_backward(weight_OI if wants_x else None, *(saved if wants_weight else ()))
        ctx.fp8, ctx.sharding, ctx.dtype = fp8, sharding, weight_OI.dtype
        ctx.gradient, ctx.shared = gradient, None if gathered is None else gathered.shared
        if ctx.shared is not None:
            ctx.shared.num_layers += wants_weight
        by_row = fp8.recipe.by_row
        group = sharding.of_features(1, by_row, transposed=False)
        x = fp8.operand(x_TI, group=group) if gathered is None else gathered.operand
        weight = fp8.operand(weight_OI, group=sharding.of_weight(by_row, transposed=False))
        return fp8.product(x, weight, x_TI.dtype, fast=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Ctx, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        weight_OI, *saved = ctx.saved_tensors
        fp8, sharding, recipe = ctx.fp8, ctx.sharding, ctx.fp8.recipe
        wants_x, wants_weight, *_ = ctx.needs_input_grad
        given = None if ctx.gradient is None else ctx.gradient.gathered
        grad_x = grad_weight = None
        if wants_x:
            by_row = recipe.by_row and not recipe.exact_weight_gradient
            weight = fp8.operand(
                weight_OI, transposed=True, by_row=by_row, group=sharding.of_weight(by_row, transposed=True)
            )
            group = sharding.of_features(0, recipe.by_row, transposed=False)
            grad = fp8.operand(grad_TO, recipe.gradient, group=group) if given is None else given.operand
            grad_x = fp8.product(grad, weight, grad_TO.dtype)
        if wants_weight and recipe.exact_weight_gradient:
            grad_weight = grad_TO.t() @ saved[0]
        elif wants_weight:
            group = sharding.of_features(0, recipe.by_row, transposed=True)
            if given is not None:
                grad = given.shared.cast(given.saved)
            else:
                grad = fp8.operand(grad_TO, recipe.gradient, transposed=True, group=group)
            group = sharding.of_features(1, recipe.by_row, transposed=True)
            x = (
                fp8.operand(saved[0], transposed=True, group=group)
                if ctx.shared is None
                else ctx.shared.transposed(saved)
            )
            grad_weight = fp8.product(grad, x, ctx.dtype)
        if given is not None and (not wants_weight or wanted(ctx)[1]):  # A split backward reads it again for weights.
            ctx.gradient.gathered = None
        return grad_x, grad_weight, None, None, None, None
