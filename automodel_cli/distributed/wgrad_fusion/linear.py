"""Gradients of linear layers that products add to, where autograd would make a tensor and add it afterwards.

While one backward makes all gradients of a microbatch (`whole_backward`), a layer's weight gradient is added by its
product to the float32 sum over microbatches that the strategy keeps (`MainGrad`), and layers that read one tensor add
to one gradient of it. In between nothing is rounded, written or read again. Elsewhere layers are torch's.

Where several layers read one tensor, autograd decides when its gradient is complete: they read an alias, whose own
node runs after all of theirs. So a layer whose result is not used, or another reader, changes nothing.

Shapes: T tokens, I inputs, O outputs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Placement, Shard


class MainGrad(Protocol):
    """Where a strategy sums the gradient of one parameter over microbatches before ranks do."""

    def place(self, gradient_dtype: torch.dtype) -> tuple[Tensor, bool] | None:
        """The local sum, and whether it must be overwritten, being new; None where autograd has to make the gradient.
        For gradients that come in this dtype."""


class WgradFusedLinear(nn.Linear):
    """A layer that `convert` has made; it is never constructed."""

    weight_sum: MainGrad | None

    def forward(self, x: Tensor) -> Tensor:
        if not _is_whole or not torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        weight, bias = self.weight, self.bias
        if not isinstance(weight, DTensor):
            y_TO: Tensor = _Linear.apply(*_alias(x), weight, bias, self.weight_sum, None)
            return y_TO.view(*x.shape[:-1], len(weight))
        if not isinstance(x, DTensor) or not isinstance(weight.placements[0], Shard) or weight.device_mesh.ndim != 1:
            return super().forward(x)
        by_outputs = weight.placements[0].dim == 0
        local_x = _local_of(x, [Partial()] if by_outputs else list(x.placements))
        y_TO = _Linear.apply(*_alias(local_x), weight, None, self.weight_sum, weight.placements)
        local_y = y_TO.view(*local_x.shape[:-1], -1)
        placement = Shard(local_y.ndim - 1) if by_outputs else Partial()
        y = DTensor.from_local(local_y, weight.device_mesh, [placement], run_check=False)
        return y if bias is None else y + bias


def fuse_wgrad(linear: nn.Linear, weight_sum: MainGrad | None) -> None:
    """Let a linear layer of torch's own class work so from now on, in place. Without a sum only inputs' gradients are
    added in products."""
    assert type(linear) is nn.Linear, f"{type(linear).__name__} computes something else"
    linear.__class__ = WgradFusedLinear
    linear.weight_sum = weight_sum  # type: ignore[assignment]


def set_main_grad(module: nn.Module, sums: dict[str, MainGrad]) -> None:
    """Tell a module that adds gradients of its parameters by itself where, by their names."""
    _sums[module] = sums


def main_grad_of(module: nn.Module) -> dict[str, MainGrad]:
    """What the module was told; nothing outside of a `whole_backward`."""
    return _sums.get(module, {}) if _is_whole else {}


_sums: weakref.WeakKeyDictionary[nn.Module, dict[str, MainGrad]] = weakref.WeakKeyDictionary()


def weight_sum_of(linear: nn.Module) -> MainGrad | None:
    """For a function of its own that computes what this layer does, with a weight that no rank shares."""
    if not _is_whole or not isinstance(linear, WgradFusedLinear) or isinstance(linear.weight, DTensor):
        return None
    return linear.weight_sum


_is_whole = False  # a plain global: backward runs layers again on threads of its own


@contextmanager
def single_backward(yes: bool = True) -> Iterator[None]:
    """Around every forward and backward of a microbatch whose backward is one run of autograd over all of its graph,
    once. Not where gradients of inputs and of weights are made apart: nodes would run, and add, twice."""
    global _is_whole
    before, _is_whole = _is_whole, yes
    try:
        yield
    finally:
        _is_whole = before


def of_local(local: Tensor, param: Tensor) -> Tensor:
    """A local gradient as what autograd wants for `param`."""
    if not isinstance(param, DTensor):
        return local
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


class _InputGradient:
    """What the layers that read one tensor have added so far."""

    def __init__(self) -> None:
        self.sum_TI: Tensor | None = None

    def add(self, grad_TO: Tensor, weight_OI: Tensor) -> None:
        if self.sum_TI is None:
            self.sum_TI = grad_TO @ weight_OI
        else:
            self.sum_TI.addmm_(grad_TO, weight_OI)

    def take(self) -> Tensor | None:
        found, self.sum_TI = self.sum_TI, None
        return found


class _Alias(torch.autograd.Function):
    """[T, I] of the same memory. Its node is where the gradients of all readers meet."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gradient: _InputGradient) -> Tensor:
        ctx.gradient, ctx.shape = gradient, x.shape
        ctx.set_materialize_grads(False)
        # `detach`: does not keep `x` alive, and shares its version, so that a change in place is an error as ever
        return x.detach().reshape(-1, x.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        found = ctx.gradient.take()
        assert grads[0] is None, "an alias has no other reader"
        return None if found is None else found.view(ctx.shape), None


@dataclass(frozen=True)
class _Reading:
    """A tensor that was read, while it lives, and the alias that its readers share."""

    of: weakref.ref[Tensor]
    version: int
    alias_TI: Tensor
    gradient: _InputGradient

    def is_of(self, x: Tensor) -> bool:
        return self.of() is x and self.version == x._version


_latest: _Reading | None = None


def _alias(x: Tensor) -> tuple[Tensor, _InputGradient | None]:
    global _latest
    if not x.requires_grad:
        return x.reshape(-1, x.shape[-1]), None
    if _latest is None or not _latest.is_of(x):
        gradient = _InputGradient()
        _latest = _Reading(weakref.ref(x, _forget), x._version, _Alias.apply(x, gradient), gradient)
    return _latest.alias_TI, _latest.gradient


def _forget(of: weakref.ref[Tensor]) -> None:
    """The alias must not hold memory that its tensor does not."""
    global _latest
    if _latest is not None and _latest.of is of:
        _latest = None


def _local_of(x: DTensor, grad_placements: list[Placement]) -> Tensor:
    """The same tensor for all readers of `x`, so that they are known to read one."""
    known: tuple[list[Placement], Tensor] | None = getattr(x, "_automodel_local", None)
    if known is None or known[0] != grad_placements:
        known = (grad_placements, x.to_local(grad_placements=grad_placements))
        x._automodel_local = known  # type: ignore[attr-defined]
    return known[1]


class _Linear(torch.autograd.Function):
    """Keeps what torch's linear layer keeps."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TI: Tensor,
        gradient: _InputGradient | None,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        weight_sum: MainGrad | None,
        placements: Any,
    ) -> Tensor:
        wants_x, _, wants_weight, *_ = ctx.needs_input_grad
        local_OI = weight_OI.to_local() if isinstance(weight_OI, DTensor) else weight_OI
        ctx.save_for_backward(x_TI if wants_weight else None, local_OI if wants_x else None)
        ctx.gradient, ctx.weight_sum, ctx.dtype = gradient, weight_sum, local_OI.dtype
        ctx.like = weight_OI
        return F.linear(x_TI, local_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI = ctx.saved_tensors
        wants_x, _, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        if wants_x:
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
    """`total_VD += left_Vs @ right_sD`, in the sum's dtype whatever the factors have: one product, where the device
    can. With `first`, `total_VD` is overwritten instead, and need not be zeroed before."""
    if total_VD.dtype == right_sD.dtype:
        torch.mm(left_Vs, right_sD, out=total_VD) if first else total_VD.addmm_(left_Vs, right_sD)
    elif total_VD.dtype == torch.float32 and _products_add_in_float32(right_sD.device.type, right_sD.dtype):
        if first:
            torch.mm(left_Vs, right_sD, out_dtype=torch.float32, out=total_VD)
        else:
            torch.addmm(total_VD, left_Vs, right_sD, out_dtype=torch.float32, out=total_VD)  # type: ignore[call-overload]
    elif first:
        total_VD.copy_(left_Vs @ right_sD)
    else:
        total_VD.add_(left_Vs @ right_sD)


@functools.cache
def _products_add_in_float32(device: str, dtype: torch.dtype) -> bool:
    """Whether `addmm` accumulates products of `dtype` in place in float32, by trying it: neither all devices nor all
    versions of torch can."""
    total, ones = torch.full((16, 16), 1000.0, device=device), torch.ones(16, 16, dtype=dtype, device=device)
    try:
        torch.mm(ones, ones, out_dtype=torch.float32, out=torch.empty_like(total))
        torch.addmm(total, ones, ones, out_dtype=torch.float32, out=total)  # type: ignore[call-overload]
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return bool((total == 1016).all())
