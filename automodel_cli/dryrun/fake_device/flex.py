"""FlexAttention on tensors without values: the memory of its kernels, one launch each, and the pairs of its blocks.

torch's compiler cannot make its kernels without a GPU. Forward keeps queries, keys, values, output and log-sum-exp, as
torch's own autograd does; a sink is one more kernel over the output, which is kept too. The backward kernel makes
scores and their gradients twice, for queries and for keys: seven products of pairs. Pairs are those of blocks that the
mask does not skip, whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from automodel_cli.distributed.typed_torch import Ctx, Function
from automodel_cli.dryrun.fake_device.torch_compat import unset_fake_temporarily
from automodel_cli.models.attention.flex import Attend
from automodel_cli.models.attention.flex_visibility import Visible


class Ran(Protocol):
    """Told of a kernel: what it read and wrote, and the FLOPs of its products."""

    def __call__(self, name: str, read: Sequence[Tensor], written: Sequence[Tensor], work: float) -> None: ...


def modelled(real: Callable[[Tensor], Tensor | None], ran: Ran) -> Attend:
    """`attention.flex.attend` of a dry run. `real` gives the integers of a tensor."""

    def attend(
        query_NHD: Tensor,
        key_MKD: Tensor,
        value_MKV: Tensor,
        sink_H: Tensor | None,
        visible: Visible,
        scale: float,
        softcap: float | None,
    ) -> tuple[Tensor, Tensor]:
        with unset_fake_temporarily():
            pairs = visible.computed_pairs(real) * query_NHD.shape[1]
        out: Tensor
        out, lse = _Kernel.apply(query_NHD, key_MKD, value_MKV, pairs, ran)
        return (out if sink_H is None else _Sink.apply(out, lse, sink_H, ran)), lse

    return attend


class _Kernel(Function):
    @staticmethod
    def forward(ctx: Ctx, query: Tensor, key: Tensor, value: Tensor, pairs: float, ran: Ran) -> tuple[Tensor, Tensor]:
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        lse = query.new_empty(query.shape[1], query.shape[0], dtype=torch.float32)
        width, value_width = query.shape[-1], value.shape[-1]
        ran("flex_attention", (query, key, value), (out, lse), 2 * pairs * (width + value_width))
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.ran, ctx.work = ran, 2 * pairs * (4 * width + 3 * value_width)
        return out, lse

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        *inputs, out, lse = ctx.saved_tensors  # once: recomputation frees them
        delta = torch.empty_like(lse)
        ctx.ran("flex_attention, products of outputs and gradients", (grad, out), (delta,), 0.0)
        grads = tuple(torch.empty_like(x) for x in inputs)
        ctx.ran("flex_attention_backward", (*inputs, grad, lse, delta), grads, ctx.work)
        return *grads, None, None


class _Sink(Function):
    @staticmethod
    def forward(ctx: Ctx, out: Tensor, lse: Tensor, sink: Tensor, ran: Ran) -> Tensor:
        result = torch.empty_like(out)
        ran("flex_attention sink", (out, lse, sink), (result,), 0.0)
        ctx.save_for_backward(out, lse, sink)
        ctx.ran = ran
        return result

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors
        grads = tuple(torch.empty_like(x) for x in kept)
        ctx.ran("flex_attention sink, backward", (grad, *kept), grads, 0.0)
        return *grads, None
