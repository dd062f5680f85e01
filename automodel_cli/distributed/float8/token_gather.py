"""Inputs of column-parallel layers, cast by each rank for its own tokens and all-gathered in float8.

Likewise output gradients of row-parallel layers, if one scale per tensor serves both of their GEMMs.

Each value is cast once for all layers with this input, by one rank, and one byte of it is sent. Values and scales are
bitwise equal to those of a gather in the original precision that every layer casts:

- One scale per token: the forward gathers values and scales. The weight gradient contracts tokens, so it needs one
  scale per feature. Each rank saves its own tokens, and the backward casts these with the maximum over all ranks.
- One scale per tensor: the maximum over all ranks is the scale of both. The gathered values are saved.

Other recipes gather in the original precision: a weight gradient in it needs the gathered input, and the layout of
MXFP8's scales depends on all tokens.

Shapes: B sequences, T tokens of a sequence, t = T / tp tokens of a rank, N = B t, I inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from automodel_cli.distributed.float8.quantization import E4M3, MULTIPLE, Arithmetic, Operand, autocast_dtype
from automodel_cli.distributed.typed_torch import Ctx, Function, set_attributes


class GatheredInput:
    """Casts of an input `[B, T, I]` for the GEMMs of all layers with this input, or of the gradient of an output.

    Args:
        own_BtI: the tokens of this rank. `N` must be a multiple of 16.

    Attributes:
        operand: for y = x W^T, or dx = dy W.
        saved: what the weight gradient needs, for `save_for_backward`.
        shared: casts `saved` in backward.
    """

    def __init__(self, own_BtI: Tensor, fp8: Arithmetic, group: dist.ProcessGroup, dtype: torch.dtype = E4M3):
        own_NI, by_row = own_BtI.flatten(0, 1), fp8.recipe.by_row
        own = fp8.operand(own_NI, dtype, group=None if by_row else group)
        num_sequences = len(own_BtI)
        values = _gathered(own.values_MK, 0, num_sequences, group)
        self.operand = Operand(values, _gathered(own.inverse, 0, num_sequences, group) if by_row else own.inverse)
        self.saved: Sequence[Tensor] = (own_NI,) if by_row else self.operand
        self.shared = SharedCast(fp8, num_sequences, group)


class SharedCast:
    """The cast for dW = dy^T x. The first layer in backward computes it, and the last one frees it."""

    def __init__(self, fp8: Arithmetic, num_sequences: int, group: dist.ProcessGroup):
        self.num_layers = 0
        """Layers that save the input."""
        self._fp8, self._num_sequences, self._group = fp8, num_sequences, group
        self._operand: Operand | None = None
        self._num_used = 0

    def transposed(self, saved: Sequence[Tensor]) -> Operand:
        """Return the cast of `[I, T]`. `saved` are the tensors of `GatheredInput.saved`."""
        operand = self._operand = self._operand or self.cast(saved)
        self._num_used += 1
        if self._num_used % self.num_layers == 0:  # A schedule may run the backward twice.
            self._operand = None
        return operand

    def cast(self, saved: Sequence[Tensor]) -> Operand:
        if not self._fp8.recipe.by_row:
            values_MK, inverse = saved
            return Operand(values_MK.t().contiguous(), inverse)
        own = self._fp8.operand(saved[0], transposed=True, group=self._group)
        return Operand(_gathered(own.values_MK, 1, self._num_sequences, self._group), own.inverse)


def can_gather_input(num_own: int, fp8: Arithmetic) -> bool:
    """Return whether an input, of which each rank has `num_own` tokens, can be gathered in float8."""
    recipe = fp8.recipe
    return not (recipe.blocks or recipe.exact_weight_gradient) and num_own % MULTIPLE == 0


def gather_input(own_BtI: Tensor, fp8: Arithmetic, mesh: DeviceMesh) -> DTensor:
    """Gather an input for which `can_gather_input` holds.

    The result has the shape of the gathered input, and its gradient. `gathered_of` returns the casts. Its values are
    nan, so that an operator that reads them is noticed.
    """
    own_BtI = own_BtI.to(autocast_dtype(own_BtI.device) or own_BtI.dtype)
    # One sequence is scattered along the first dimension, which needs no copy to reorder the shards.
    is_one = len(own_BtI) == 1
    own = DTensor.from_local(own_BtI.squeeze(0) if is_one else own_BtI, mesh, [Shard(0 if is_one else 1)])
    whole: DTensor = _Gather.apply(own)
    whole_BTI = cast("DTensor", whole.unsqueeze(0)) if is_one else whole
    set_attributes(whole_BTI, gathered=GatheredInput(own_BtI.detach(), fp8, mesh.get_group()))
    return whole_BTI


def gathered_of(x: Tensor) -> GatheredInput | None:
    gathered: GatheredInput | None = vars(x).get("gathered")
    return gathered


class _Gather(Function):
    """Only the shape of the gathered tensor. The backward reduce-scatters, as that of a gather does."""

    @staticmethod
    def forward(ctx: Ctx, own: DTensor) -> DTensor:
        ctx.placements = own.placements
        return _shape_only(own)

    @staticmethod
    def backward(ctx: Ctx, grad: DTensor) -> DTensor:
        return grad.redistribute(placements=ctx.placements)


@dataclass
class OutputGradient:
    """The gradient of the output of a row-parallel layer, which `scatter_output` gathers."""

    fp8: Arithmetic
    gathered: GatheredInput | None = None


def scatter_output(y_BTO: DTensor, gradient: OutputGradient) -> Tensor:
    """Reduce-scatter the partial sums of a layer over tokens, `[B, t, O]`. The backward gathers in float8.

    The gradient that autograd passes on has a shape only. The layer reads `gradient`.
    """
    is_one = len(y_BTO) == 1
    own: DTensor = _Scatter.apply(y_BTO.squeeze(0) if is_one else y_BTO, gradient)
    return own.to_local().unsqueeze(0) if is_one else own.to_local()


def output_gradient_of(y: Tensor) -> OutputGradient | None:
    gradient: OutputGradient | None = vars(y).get("output_gradient")
    return gradient


class _Scatter(Function):
    @staticmethod
    def forward(ctx: Ctx, partial: DTensor, gradient: OutputGradient) -> DTensor:
        ctx.gradient = gradient
        return partial.redistribute(placements=[Shard(partial.ndim - 2)], async_op=True)

    @staticmethod
    def backward(ctx: Ctx, grad: DTensor) -> tuple[DTensor, None]:
        own, fp8 = grad.to_local(), ctx.gradient.fp8
        own_BtO = own.unsqueeze(0) if own.ndim == 2 else own
        ctx.gradient.gathered = GatheredInput(own_BtO, fp8, grad.device_mesh.get_group(), fp8.recipe.gradient)
        return _shape_only(grad), None


def _shape_only(own: DTensor) -> DTensor:
    """Return a tensor of nan with the shape of `own`, which is not allocated."""
    nan = own.to_local().new_full((1,), torch.nan).expand(own.shape)
    return DTensor.from_local(nan, own.device_mesh, [Replicate()])


def _gathered(own: Tensor, dim: int, num_sequences: int, group: dist.ProcessGroup) -> Tensor:
    """All-gather the tokens of all sequences along `dim`, `[N, F]` or `[I, N]`."""
    # As bytes, because not every backend sends float8.
    own_bytes, num_ranks = own.view(torch.uint8), dist.get_world_size(group)
    of_ranks = own_bytes.new_empty(num_ranks * len(own), *own_bytes.shape[1:])
    dist.all_gather_into_tensor(of_ranks, own_bytes, group=group)
    # [ranks, ..., B t, ...] to [..., B ranks t, ...]
    rows = of_ranks.unflatten(0, (num_ranks, len(own))).unflatten(dim + 1, (num_sequences, -1))
    full: Tensor = rows.movedim(0, dim + 1).flatten(dim, dim + 2).view(own.dtype)
    return full
