"""Fused computation of LoRA layers: `y = x W^T + b + s (x A^T) B^T` with few passes over large tensors.

`peft` multiplies by the scale, adds the update and adds the input gradients in kernels of their own. Here the scale is
part of a GEMM, and every sum is accumulated by a GEMM. Layers that read the same input (q, k and v; gate and up) share
one GEMM for their A matrices, in forward and in backward::

    h  = x [A_q; A_k; A_v]^T            one GEMM for all readers of x
    y  = x W^T + b;   y += s h B^T      the second GEMM accumulates
    dx = dy W;        dx += dh A        accumulated over all readers

Layers that this module does not know (dropout in training, DoRA and other variants, DTensors of tensor parallelism,
modules with hooks, mixed dtypes, compiled layers) compute as in `peft`.

Shapes: T tokens, I inputs, O outputs, R rank, and C the sum of the ranks of a group.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from automodel_cli.distributed.adapter_layers import is_adapter
from automodel_cli.distributed.typed_torch import Ctx, Function, set_attributes
from automodel_cli.distributed.wgrad_fusion import linear as wgrad_fusion
from automodel_cli.models.lora.layer import ADAPTER, AdapterLayer
from automodel_cli.models.transformers_compat import is_dtensor

_GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("query", "key", "value"),
    ("query_proj", "key_proj", "value_proj"),
    ("w1", "w3"),
)
"""Names of sibling layers that read the same input in families of transformers. Another input is detected per call."""


def fuse_adapters(model: nn.Module) -> int:
    """Convert the plain LoRA layers of a model in place. Returns their number.

    Call after the adapters are attached. Works on the meta device. `peft` is not imported for models without adapters.
    """
    fused = [module for module in model.modules() if is_adapter(module) and _is_plain(module)]
    for layer in fused:
        layer.__class__ = _fused_class()
        set_attributes(layer, _automodel_group=_Group([layer]))
    for parent in model.modules():
        for group in _siblings(parent, {id(layer): layer for layer in fused}):
            shared = _Group(group)
            for layer in group:
                set_attributes(layer, _automodel_group=shared)
    return len(fused)


def _siblings(parent: nn.Module, fused: dict[int, AdapterLayer]) -> Iterator[list[AdapterLayer]]:
    for names in _GROUPS:
        found = [fused.get(id(parent._modules.get(name))) for name in names]
        members = [layer for layer in found if layer is not None]
        if len(members) > 1:
            yield members


def _is_plain(layer: nn.Module) -> TypeGuard[AdapterLayer]:
    from peft.tuners.lora.layer import Linear

    return type(layer) is Linear and not layer.lora_variant and not layer.fan_in_fan_out


@cache
def _fused_class() -> type[AdapterLayer]:
    from peft.tuners.lora.layer import Linear

    return type("FusedLoRALinear", (_FusedLoRA, Linear), {})


class _FusedLoRA(AdapterLayer):
    """Forward of a converted layer, mixed into the class of `peft`."""

    _automodel_group: _Group

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        if args or kwargs or not _can_fuse(self, x):
            return super().forward(x, *args, **kwargs)
        base, up = self.base_layer, self.lora_B[ADAPTER].weight
        scale: float = self.scaling[ADAPTER]
        shares = wgrad_fusion.is_single() and torch.is_grad_enabled()
        x_TI, gradient = wgrad_fusion.alias(x) if shares else (x.reshape(-1, x.shape[-1]), None)
        h_TR = self._automodel_group.down(self, x, x_TI, gradient, shares)
        if not _is_frozen_linear(base, x):
            y_TO = base(x).reshape(-1, up.shape[0])
            # `addmm` adds in the GEMM: y is read and written once, and no `s h B^T` of size [T, O] is stored.
            y_TO = torch.addmm(y_TO, h_TR, up.t(), alpha=scale)
        elif shares:
            y_TO = _Up.apply(x_TI, gradient, base.weight, base.bias, h_TR, up, scale, self.keeps_products)
        else:
            y_TO = F.linear(x_TI, base.weight, base.bias)
            add = torch.addmm if torch.is_grad_enabled() else Tensor.addmm_
            y_TO = add(y_TO, h_TR, up.t(), alpha=scale)
        y: Tensor = y_TO.view(*x.shape[:-1], -1)
        return y


def _can_fuse(layer: AdapterLayer, x: Tensor) -> bool:
    if layer.disable_adapters or layer.merged or layer.lora_variant or torch.compiler.is_compiling():
        return False
    dropout = layer.lora_dropout[ADAPTER]
    if layer.training and isinstance(dropout, nn.Dropout) and dropout.p > 0:
        return False
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
        return False
    matrices = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
    return all(_is_readable(matrix, x) for matrix in matrices)


def _is_readable(linear: nn.Linear, x: Tensor) -> bool:
    """Return whether the weight can be used without calling the module, which may have hooks that gather it."""
    weight = linear.weight
    hooks = linear._forward_pre_hooks or linear._forward_hooks
    of_one_kind = weight.dtype == x.dtype and not is_dtensor(x) and not is_dtensor(weight)
    return of_one_kind and not hooks and linear.bias is None


def _is_frozen_linear(base: nn.Module, x: Tensor) -> TypeGuard[nn.Linear]:
    if type(base) not in (nn.Linear, wgrad_fusion.WgradFusedLinear) or base._forward_pre_hooks or base._forward_hooks:
        return False
    params = [param for param in (base.weight, base.bias) if param is not None]
    return all(p.dtype == x.dtype and not p.requires_grad and not is_dtensor(p) for p in params)


@dataclass
class _Projected:
    """Results of the A matrices of a group for one input, until every layer has taken its own."""

    of: weakref.ref[Tensor]
    version: int
    shares: bool
    by_layer: dict[int, Tensor]


# Example: q, k and v read x `[T, I]`. The first call, by q, computes `x [A_q; A_k; A_v]^T` `[T, C]` and stores the
# parts of k and v. Their calls with the same x take them. A call with another tensor, or after an in-place change of x,
# computes again.
class _Group:
    """Layers that usually read the same tensor."""

    def __init__(self, layers: Sequence[AdapterLayer]):
        self.layers = list(layers)
        self._latest: _Projected | None = None

    def down(
        self, layer: AdapterLayer, x: Tensor, x_TI: Tensor, gradient: wgrad_fusion.InputGradient | None, shares: bool
    ) -> Tensor:
        """Return `x A^T` of `layer`. Computes it for all layers of the group at the first call."""
        latest = self._latest
        if latest is None or not self._is_of(latest, x, shares) or id(layer) not in latest.by_layer:
            latest = self._latest = self._projected(layer, x, x_TI, gradient, shares)
        # Each layer takes its result once, so a second call of the layer (recomputation) computes it again.
        h_TR = latest.by_layer.pop(id(layer))
        if not latest.by_layer:
            self._latest = None
        return h_TR

    def _is_of(self, latest: _Projected, x: Tensor, shares: bool) -> bool:
        return latest.of() is x and latest.version == x._version and latest.shares == shares

    def _projected(
        self, layer: AdapterLayer, x: Tensor, x_TI: Tensor, gradient: wgrad_fusion.InputGradient | None, shares: bool
    ) -> _Projected:
        layers = [one for one in self.layers if one is layer or _can_fuse(one, x)]
        weights = [one.lora_A[ADAPTER].weight for one in layers]
        if shares:
            outputs = _Down.apply(x_TI, gradient, *weights)
        elif torch.is_grad_enabled():  # Schedules may split this backward.
            layers, outputs = [layer], [F.linear(x_TI, layer.lora_A[ADAPTER].weight)]
        else:
            outputs = _project(x_TI, weights)[0]
        results = dict(zip(map(id, layers), outputs, strict=True))
        # A weak reference: a group must not keep activations alive. `_version` detects in-place changes.
        return _Projected(weakref.ref(x, self._forget), x._version, shares, results)

    def _forget(self, of: weakref.ref[Tensor]) -> None:
        """Release results that nobody took, together with their input."""
        if self._latest is not None and self._latest.of is of:
            self._latest = None


def _project(x_TI: Tensor, weights: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], Tensor]:
    down_CI = torch.cat(list(weights)) if len(weights) > 1 else weights[0]
    return (x_TI @ down_CI.t()).split([len(weight) for weight in weights], dim=1), down_CI


class _Down(Function):
    """`x A^T` for several A. Adds its input gradient to that of the other readers of `x`."""

    @staticmethod
    def forward(
        ctx: Ctx, x_TI: Tensor, gradient: wgrad_fusion.InputGradient | None, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        outputs, down_CI = _project(x_TI, weights)
        ctx.save_for_backward(x_TI, down_CI)
        ctx.gradient, ctx.ranks = gradient, [len(weight) for weight in weights]
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, down_CI = ctx.saved_tensors
        # [T, C] of all readers, so that their input gradient and their weight gradients are one GEMM each.
        grad_TC = torch.cat(grads, 1) if len(grads) > 1 else grads[0]
        if ctx.gradient is not None:
            ctx.gradient.add(grad_TC, down_CI)
        return None, None, *(grad_TC.t() @ x_TI).split(ctx.ranks)


class _Up(Function):
    """`x W^T + b + s h B^T` with frozen W and b."""

    @staticmethod
    def forward(
        ctx: Ctx,
        x_TI: Tensor,
        gradient: wgrad_fusion.InputGradient | None,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        h_TR: Tensor,
        up_OR: Tensor,
        scale: float,
        keeps_products: bool,
    ) -> Tensor:
        ctx.save_for_backward(weight_OI, h_TR, up_OR)
        ctx.gradient, ctx.scale = gradient, scale
        add = torch.addmm if keeps_products else Tensor.addmm_
        return add(F.linear(x_TI, weight_OI, bias_O), h_TR, up_OR.t(), alpha=scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Ctx, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        weight_OI, h_TR, up_OR = ctx.saved_tensors
        if ctx.gradient is not None:
            ctx.gradient.add(grad_TO, weight_OI)
        # With beta=0, the first argument is not read.
        grad_h_TR = torch.addmm(h_TR, grad_TO, up_OR, beta=0, alpha=ctx.scale)
        grad_up_OR = torch.addmm(up_OR, grad_TO.t(), h_TR, beta=0, alpha=ctx.scale)
        return None, None, None, None, grad_h_TR, grad_up_OR, None, None
