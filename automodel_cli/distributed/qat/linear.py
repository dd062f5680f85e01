"""Linear layers that compute with fake-quantized weights and inputs, unsharded or sharded by tensor parallelism.

The layer is torch's with another class, as in `float8/linear.py`: loading, sharding, checkpoints and optimizers see the
unquantized parameter. Gradients pass rounding unchanged (straight-through estimator)::

    y = Q(x) Q(W)^T      dx = mask(x) dy Q(W)      dW = mask(W) dy^T Q(x)

Backward quantizes again, with saved scales. So a layer saves what an unquantized layer saves, and FSDP2 can reshard W.

With an adapter, W is the sum of a frozen weight and a low-rank update, which is formed where it is read::

    W = W0 + s B A       dB = s dW A^T      dA = s B^T dW

dW exists for one layer at a time. Formats without a mask need no dW: dB = s dy^T (Q(x) A^T), dA = s (dy B)^T Q(x).

If tensor parallelism shards the dimension of a scale, the maximum is taken over all its ranks. Every rank then rounds
as one process would.

Shapes: T tokens, I inputs, O outputs, R rank, G groups of a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.float8.quantization import autocast_dtype
from automodel_cli.distributed.qat.formats import Scales, fake_quantized, masked, token_scales, weight_scales
from automodel_cli.distributed.qat.settings import FakeQuantization, LowRank
from automodel_cli.distributed.replicated_sums import sum_gradient
from automodel_cli.distributed.sharded_linear import linear_over_tp
from automodel_cli.distributed.tensors import to_local
from automodel_cli.distributed.typed_torch import Ctx, Function, modules_of, set_attributes


class Quantized(Protocol):
    """A module with quantized weights."""

    qat: FakeQuantization


class QATLinear(nn.Linear):
    """Created by `convert_to_qat`, never constructed."""

    qat: FakeQuantization
    shares: tuple[QATLinear, ...]
    """Layers that an engine joins with this one, itself included. They have one factor in nvfp4."""
    adapter: Callable[[], LowRank] | None
    """Returns the update of the adapter around this layer, with its parameters as they are in forward."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.qat.active:
            return super().forward(x)
        weight = self.weight
        dtype = autocast_dtype(x.device)
        if dtype is not None:
            x, weight = x.to(dtype), cast(nn.Parameter, weight.to(dtype))
        # One factor for q, k and v, because engines load them as one matrix with one factor.
        amax = self.tensor_amax() if self.qat.weights.name == "nvfp4" else None
        if isinstance(weight, DTensor):
            y = _over_tp(x, weight, self._low_rank(), self.qat, amax)
        else:
            y = _matmul(x, weight, self._low_rank(), self.qat, amax, None, None)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    @torch.no_grad()
    def tensor_amax(self) -> Tensor:
        """Return the largest absolute value of the weights that share a factor. Collective over tp."""
        local = [(to_local(layer.weight), layer._low_rank()) for layer in self.shares]
        amax = torch.stack([self.qat.rounded(w, low_rank).float().abs().amax() for w, low_rank in local]).amax()
        own = self.weight
        return _max_over(own.device_mesh.get_group(), amax) if isinstance(own, DTensor) else amax

    def _low_rank(self) -> LowRank | None:
        """Return the update of the weight that this rank has."""
        if self.adapter is None:
            return None
        a_RI, b_OR, scale = self.adapter()
        weight = self.weight
        if not isinstance(weight, DTensor):
            return LowRank(a_RI, b_OR, scale)
        # A rank has the gradient of its shard of W. For a replicated matrix, it is a part of the sum.
        mesh, (outputs, inputs) = weight.device_mesh, weight.to_local().shape
        a_RI, b_OR = (
            matrix.to_local() if isinstance(matrix, DTensor) else sum_gradient(matrix, mesh) for matrix in (a_RI, b_OR)
        )
        # Whole, if the layer splits its input itself.
        a_RI = a_RI if a_RI.shape[1] == inputs else a_RI.chunk(mesh.size(), 1)[mesh.get_local_rank()]
        b_OR = b_OR if len(b_OR) == outputs else b_OR.chunk(mesh.size())[mesh.get_local_rank()]
        return LowRank(a_RI, b_OR, scale)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, qat={self.qat.weights.name}"


def convert_to_qat(linear: nn.Linear, quantization: FakeQuantization, shares: Sequence[nn.Module] = ()) -> None:
    """Compute this linear layer with fake quantization from now on, in place."""
    linear.__class__ = QATLinear
    set_attributes(linear, qat=quantization, adapter=None)
    object.__setattr__(linear, "shares", tuple(shares) or (linear,))


def quantized_layers(module: nn.Module) -> Iterator[tuple[str, QATLinear]]:
    """(name, layer) of all of them in `module`."""
    return modules_of(module, QATLinear)


def quantized_experts(module: nn.Module) -> Iterator[tuple[str, Quantized]]:
    """(name, experts module) of all experts with quantized weights in `module`."""
    children = ((name, child) for name, child in module.named_modules() if not isinstance(child, QATLinear))
    return ((name, cast(Quantized, child)) for name, child in children if "qat" in vars(child))


def _quantized(parts: Sequence[nn.Module]) -> Iterator[Quantized]:
    for part in parts:
        yield from (layer for _, layer in quantized_layers(part))
        yield from (experts for _, experts in quantized_experts(part))


def set_active(parts: Sequence[nn.Module], active: bool) -> None:
    """Switch fake quantization on or off from now on."""
    for module in _quantized(parts):
        module.qat.active = active


def settle(part: nn.Module, compute_dtype: torch.dtype) -> None:
    """Set the compute dtype, after tensor parallelism. Raises ConfigError for groups that a shard cuts."""
    for module in _quantized([part]):
        module.qat.compute_dtype = compute_dtype
    for name, layer in quantized_layers(part):
        group = layer.qat.weights.group_size
        if group is None or not isinstance(layer.weight, DTensor) or not layer.weight.placements[0].is_shard(1):
            continue
        local = layer.weight.to_local().shape[1]
        if local % group:
            raise ConfigError(
                f"qat.group_size={group} must divide the {local} inputs of {name} on each rank of tensor parallelism",
                code="not_divisible",
                keys=("model.qat.group_size", "mesh.tp_size"),
                fix="mesh.tp_size=1",
            )


@contextmanager
def switched(parts: Sequence[nn.Module], *, active: bool, activations: bool = True) -> Iterator[None]:
    """Quantize, or do not, inside this context. `activations=False`: weights only."""
    layers = list(_quantized(parts))
    before = [layer.qat for layer in layers]
    for layer in layers:
        kept = layer.qat.activations if activations else None
        layer.qat = dataclasses.replace(layer.qat, active=active, activations=kept)
    try:
        yield
    finally:
        for layer, quantization in zip(layers, before, strict=True):
            layer.qat = quantization


def _over_tp(
    x: Tensor, weight: DTensor, low_rank: LowRank | None, qat: FakeQuantization, amax: Tensor | None
) -> Tensor:
    def compute(local_x: Tensor, local_w: Tensor, placement: Shard, mesh: DeviceMesh) -> Tensor:
        # Sharded outputs (dim 0): a rank has complete rows. Sharded inputs (dim 1): a row's maximum is over all ranks.
        group = None if placement.dim == 0 else mesh.get_group()
        rows = group if qat.weights.group_size is None else None
        return _matmul(local_x, local_w, low_rank, qat, amax, rows, group)

    return linear_over_tp(x, weight, compute)


def _matmul(
    x: Tensor,
    weight_OI: Tensor,
    low_rank: LowRank | None,
    qat: FakeQuantization,
    amax: Tensor | None,
    rows: dist.ProcessGroup | None,
    tokens: dist.ProcessGroup | None,
) -> Tensor:
    """Multiply. `rows` and `tokens`: groups over which the scales of weights and of inputs are sharded."""
    update = (None, None, 1.0) if low_rank is None else low_rank
    y_TO: Tensor = _Linear.apply(x.flatten(0, -2), weight_OI, *update, qat, amax, _over(rows), _over(tokens))
    return y_TO.view(*x.shape[:-1], len(weight_OI))


def _over(group: dist.ProcessGroup | None) -> Callable[[Tensor], Tensor] | None:
    return None if group is None else partial(_max_over, group)


def _max_over(group: dist.ProcessGroup, values: Tensor) -> Tensor:
    values = values.contiguous()
    dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return values


class _Linear(Function):
    """Linear function of fake-quantized operands. Saves the unquantized ones and their scales."""

    @staticmethod
    def forward(
        ctx: Ctx,
        x_TI: Tensor,
        weight_OI: Tensor,
        a_RI: Tensor | None,
        b_OR: Tensor | None,
        scale: float,
        qat: FakeQuantization,
        amax: Tensor | None,
        over_rows: Callable[[Tensor], Tensor] | None,
        over_tokens: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        rounded_OI = qat.rounded(weight_OI, _update(a_RI, b_OR, scale))
        of_weight = weight_scales(rounded_OI, qat.weights, amax, over_rows)
        of_x = None if qat.activations is None else token_scales(x_TI, qat.activations, over_tokens)
        ctx.qat, ctx.scale = qat, scale
        # Scales are 1 / group of the weight's size. The quantized weight would be a second copy of it per layer.
        scales = of_weight.of_groups, None if of_x is None else of_x.of_groups
        ctx.save_for_backward(x_TI, weight_OI, a_RI, b_OR, *scales)
        return _quantized_x(x_TI, qat, of_x) @ _quantized_weight(rounded_OI, qat, of_weight, weight_OI.dtype).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Ctx, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight_OI, a_RI, b_OR, groups_OG, groups_T1 = ctx.saved_tensors
        qat: FakeQuantization = ctx.qat
        update = _update(a_RI, b_OR, ctx.scale)
        wants_x, wants_weight, wants_a, wants_b, *_ = ctx.needs_input_grad
        of_weight, of_x = Scales(groups_OG), None if groups_T1 is None else Scales(groups_T1)
        rounded_OI = qat.rounded(weight_OI, update)
        grad_x = grad_weight = None
        if wants_x:
            grad_x = grad_TO @ _quantized_weight(rounded_OI, qat, of_weight, weight_OI.dtype)
            if of_x is not None and qat.activations is not None:
                grad_x = masked(grad_x, x_TI, qat.activations, of_x)
        if wants_weight or ((wants_a or wants_b) and qat.weights.is_integer):
            grad_weight = grad_TO.t() @ _quantized_x(x_TI, qat, of_x)
            # The gradient of Q(W) is passed to W, except where W is outside the range of the codes and Q(W) does not
            # depend on it.
            grad_weight = masked(grad_weight, rounded_OI, qat.weights, of_weight)
        grad_a = grad_b = None
        if update is not None and (wants_a or wants_b):
            grad_a, grad_b = _of_update(grad_TO, _quantized_x(x_TI, qat, of_x), grad_weight, update)
        return grad_x, grad_weight if wants_weight else None, grad_a, grad_b, *[None] * 5


def _update(a_RI: Tensor | None, b_OR: Tensor | None, scale: float) -> LowRank | None:
    return None if a_RI is None or b_OR is None else LowRank(a_RI, b_OR, scale)


def _of_update(grad_TO: Tensor, read_TI: Tensor, grad_OI: Tensor | None, update: LowRank) -> tuple[Tensor, Tensor]:
    """Return the gradients of A and B: of dW if it is given, else without forming it."""
    a_RI, b_OR = (matrix.to(grad_TO.dtype) for matrix in (update.a_RI, update.b_OR))
    if grad_OI is None:
        grad_a, grad_b = (grad_TO @ b_OR).t() @ read_TI, grad_TO.t() @ (read_TI @ a_RI.t())
    else:
        grad_a, grad_b = b_OR.t() @ grad_OI, grad_OI @ a_RI.t()
    return (update.scale * grad_a).to(update.a_RI.dtype), (update.scale * grad_b).to(update.b_OR.dtype)


def _quantized_weight(rounded_OI: Tensor, qat: FakeQuantization, scales: Scales, dtype: torch.dtype) -> Tensor:
    return fake_quantized(rounded_OI, qat.weights, scales, qat.read_dtype).to(dtype)


def _quantized_x(x_TI: Tensor, qat: FakeQuantization, scales: Scales | None) -> Tensor:
    if scales is None or qat.activations is None:
        return x_TI
    return fake_quantized(x_TI, qat.activations, scales, x_TI.dtype)
