"""Linear layers whose weight-gradient GEMM accumulates directly into the float32 main gradient.

Autograd would write a gradient tensor, round it to the dtype of the weight, and add it afterwards. Inside
`single_backward`, the GEMM adds to the float32 sum over microbatches that the strategy owns (`MainGrad`). Layers that
read the same input also accumulate one input gradient::

    dW += dy^T x      one GEMM into float32      (instead of GEMM, write, read, add)
    dx += dy W        one GEMM per reader of x   (q, k and v projections share dx)

Outside `single_backward`, the layers are torch's.

Readers of one tensor share an alias of it. Autograd runs the node of the alias after the nodes of all its readers, when
the input gradient is complete. Unused results and other readers of the tensor are supported.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from automodel_cli.distributed.tensors import to_local
from automodel_cli.distributed.typed_torch import Ctx, Function, set_attributes


class MainGrad(Protocol):
    """Sum of the gradient of one parameter over microbatches, before reduction over ranks.

    Implemented by a strategy.
    """

    def place(self, gradient_dtype: torch.dtype) -> tuple[Tensor, bool] | None:
        """Return the local sum and whether to overwrite it because it is new. None if autograd must compute the
        gradient.

        Args:
            gradient_dtype: dtype of the gradients that would be added.
        """


class WgradFusedLinear(nn.Linear):
    """Created by `fuse_wgrad`, never constructed."""

    weight_sum: MainGrad | None

    def forward(self, x: Tensor) -> Tensor:
        if not _is_single or not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        weight, bias = self.weight, self.bias
        if not isinstance(weight, DTensor):
            y_TO: Tensor = _Linear.apply(*alias(x), weight, bias, self.weight_sum, None)
            return y_TO.view(*x.shape[:-1], len(weight))
        if not isinstance(x, DTensor) or not isinstance(weight.placements[0], Shard) or weight.device_mesh.ndim != 1:
            return super().forward(x)
        by_outputs = weight.placements[0].dim == 0
        local_x = _local_of(x, [Partial()] if by_outputs else list(x.placements))
        y_TO = _Linear.apply(*alias(local_x), weight, None, self.weight_sum, weight.placements)
        local_y = y_TO.view(*local_x.shape[:-1], -1)
        placement = Shard(local_y.ndim - 1) if by_outputs else Partial()
        y = DTensor.from_local(local_y, weight.device_mesh, [placement], run_check=False)
        return y if bias is None else y + bias


def fuse_wgrad(linear: nn.Linear, weight_sum: MainGrad | None) -> None:
    """Convert a `torch.nn.Linear` in place. Without a main gradient, only input gradients accumulate."""
    assert type(linear) is nn.Linear, f"{type(linear).__name__} computes something else"
    linear.__class__ = WgradFusedLinear
    set_attributes(linear, weight_sum=weight_sum)


def set_main_grad(module: nn.Module, sums: dict[str, MainGrad]) -> None:
    """Register the main gradients of a module that accumulates them itself, by parameter name."""
    _sums[module] = sums


def main_grad_of(module: nn.Module) -> dict[str, MainGrad]:
    """Return the registered main gradients. Empty outside `single_backward`."""
    return _sums.get(module, {}) if _is_single else {}


_sums: weakref.WeakKeyDictionary[nn.Module, dict[str, MainGrad]] = weakref.WeakKeyDictionary()


def weight_sum_of(linear: nn.Module) -> MainGrad | None:
    """Return the main gradient of a layer whose computation is replaced, if its weight is not sharded."""
    if not _is_single or isinstance(linear.weight, DTensor):
        return None
    return linear.weight_sum if isinstance(linear, WgradFusedLinear) else _sums.get(linear, {}).get("weight")


_is_single = False  # A global and not thread-local, because backward recomputes layers in other threads.


def is_single() -> bool:
    """Return whether the code runs inside `single_backward`."""
    return _is_single


@contextmanager
def single_backward(yes: bool = True) -> Iterator[None]:
    """Enable accumulation in the forward and backward of a microbatch.

    Backward must run once over the complete graph. Schedules that split the backward into input and weight gradients
    would run nodes, and accumulate, twice.
    """
    global _is_single
    before, _is_single = _is_single, yes
    try:
        yield
    finally:
        _is_single = before


def of_local(local: Tensor, param: Tensor) -> Tensor:
    """Convert a local gradient to the type that autograd expects for `param`."""
    if not isinstance(param, DTensor):
        return local
    # Shape and stride are given, because shards may be uneven and `from_local` would assume even ones.
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


# Example: q, k and v read x. In backward, q overwrites: sum = dq W_q. k and v add: sum += dk W_k, sum += dv W_v. Then
# `_Alias.backward` returns the sum as the gradient of x. Autograd alone would store three [T, I] tensors and add them.
class InputGradient:
    """Input gradient that the readers of one tensor accumulate."""

    def __init__(self) -> None:
        self.sum_TI: Tensor | None = None

    def add(self, grad_TO: Tensor, weight_OI: Tensor) -> None:
        # The first reader overwrites, the others accumulate in the same GEMM.
        if self.sum_TI is None:
            self.sum_TI = grad_TO @ weight_OI
        else:
            self.sum_TI.addmm_(grad_TO, weight_OI)

    def take(self) -> Tensor | None:
        result, self.sum_TI = self.sum_TI, None
        return result


class _Alias(Function):
    """Return a view of the input as `[T, I]`. Its backward runs after all readers of the input."""

    @staticmethod
    def forward(ctx: Ctx, x: Tensor, gradient: InputGradient) -> Tensor:
        ctx.gradient, ctx.shape = gradient, x.shape
        ctx.set_materialize_grads(False)
        # `detach` does not keep `x` alive. It shares the version counter, so in-place changes still raise an error.
        return x.detach().reshape(-1, x.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Ctx, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        result = ctx.gradient.take()
        assert grads[0] is None, "an alias has no other reader"
        return None if result is None else result.view(ctx.shape), None


@dataclass(frozen=True)
class _Reading:
    """The last tensor that was read, as a weak reference, and the alias that its readers share."""

    of: weakref.ref[Tensor]
    version: int
    alias_TI: Tensor
    gradient: InputGradient

    def is_of(self, x: Tensor) -> bool:
        return self.of() is x and self.version == x._version


_latest: _Reading | None = None


def alias(x: Tensor) -> tuple[Tensor, InputGradient | None]:
    """Return the alias `[T, I]` of a tensor for one more reader, and the input gradient that its readers accumulate.

    The gradient is None if `x` needs none. Use only if `is_single()`.
    """
    global _latest
    if not x.requires_grad:
        return x.reshape(-1, x.shape[-1]), None
    if _latest is None or not _latest.is_of(x):
        gradient = InputGradient()
        _latest = _Reading(weakref.ref(x, _forget), x._version, _Alias.apply(x, gradient), gradient)
    return _latest.alias_TI, _latest.gradient


def _forget(of: weakref.ref[Tensor]) -> None:
    """Release the alias together with its tensor."""
    global _latest
    if _latest is not None and _latest.of is of:
        _latest = None


def _local_of(x: DTensor, grad_placements: list[Placement]) -> Tensor:
    """Return one local tensor for all readers of `x`, so that they share an alias."""
    known: tuple[list[Placement], Tensor] | None = getattr(x, "_automodel_local", None)
    if known is None or known[0] != grad_placements:
        known = (grad_placements, x.to_local(grad_placements=grad_placements))
        x._automodel_local = known  # type: ignore[attr-defined]
    return known[1]


class _Linear(Function):
    """Linear function that saves the same tensors as torch's."""

    @staticmethod
    def forward(
        ctx: Ctx,
        x_TI: Tensor,
        gradient: InputGradient | None,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        weight_sum: MainGrad | None,
        placements: Sequence[Placement] | None,
    ) -> Tensor:
        wants_x, _, wants_weight, *_ = ctx.needs_input_grad
        local_OI = to_local(weight_OI)
        # x for dW, W for dx. A frozen layer saves no input.
        ctx.save_for_backward(x_TI if wants_weight else None, local_OI if wants_x else None)
        ctx.gradient, ctx.weight_sum, ctx.dtype = gradient, weight_sum, local_OI.dtype
        ctx.like = weight_OI
        return F.linear(x_TI, local_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Ctx, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI = ctx.saved_tensors
        wants_x, _, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        if wants_x:
            # Returns no input gradient here. `_Alias.backward` returns the sum after the last reader.
            ctx.gradient.add(grad_TO, weight_OI)
        grad_weight = None
        if wants_weight:
            place = None if ctx.weight_sum is None else ctx.weight_sum.place(ctx.dtype)
            if place is None:
                grad_weight = of_local(grad_TO.t() @ x_TI, ctx.like)
            else:
                add_product_(place[0], grad_TO.t(), x_TI, first=place[1])
        return None, None, grad_weight, grad_TO.sum(0) if wants_bias else None, None, None


def add_product_(total_VD: Tensor, left_Vs: Tensor, right_sD: Tensor, *, first: bool = False) -> None:
    """Compute `total_VD += left_Vs @ right_sD` in the dtype of the sum, with one GEMM if the device supports it.

    Args:
        first: overwrite `total_VD`, which may be uninitialized.
    """
    if total_VD.dtype == right_sD.dtype:
        torch.mm(left_Vs, right_sD, out=total_VD) if first else total_VD.addmm_(left_Vs, right_sD)
    elif total_VD.dtype == torch.float32 and _products_add_in_float32(right_sD.device.type, right_sD.dtype):
        if first:
            torch.mm(left_Vs, right_sD, out_dtype=torch.float32, out=total_VD)
        else:
            torch.addmm(total_VD, left_Vs, right_sD, out_dtype=torch.float32, out=total_VD)
    elif first:
        total_VD.copy_(left_Vs @ right_sD)
    else:
        total_VD.add_(left_Vs @ right_sD)


@functools.cache
def _products_add_in_float32(device: str, dtype: torch.dtype) -> bool:
    """Return whether `addmm` accumulates GEMMs of `dtype` in place in float32. Tested, because not all devices and
    versions of torch do.
    """
    # A kernel that ignores `total` gives 16 instead of 1016.
    total, ones = torch.full((16, 16), 1000.0, device=device), torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.mm(ones, ones, out_dtype=torch.float32, out=torch.empty_like(total))
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool((total == 1016).all())
