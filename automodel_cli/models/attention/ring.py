"""Attention over context-parallel ranks without ever holding all keys: they travel around the ring of ranks.

Every rank computes its queries against the keys it holds, passes them on while it computes, and merges what it found by
log-sum-exp: with partial outputs O1, O2 and log-sum-exps L1, L2 the whole is L = logaddexp(L1, L2) and
O = O1 exp(L1 - L) + O2 exp(L2 - L), exactly. A sink is one more term of L. The backward goes around once more: the
ordinary flash backward of each part, given the final (O, L), recomputes P = exp(S - L) and is that part's exact share.
The gradients of keys and values travel with them and come home after a full turn.

The CUDA path has NEVER been run on a GPU. Shapes: N local queries and N keys of each rank, H heads, K kv heads, D one
head width for all three; n and m queries and keys of a call.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from automodel_cli.models.attention import flex as attention_flex
from automodel_cli.models.attention import kernels as kernels
from automodel_cli.models.attention import varlen_segments as segments
from automodel_cli.models.context_parallel_layout import Context

_NEVER = 1e30  # a log-sum-exp so large that every probability is 0


class Setting(NamedTuple):
    """Of one layer's attention. `way`: see `attention_choice.way`."""

    scale: float
    window: int | None
    softcap: float | None
    way: str


class KernelCall(Protocol):
    """Some queries of this rank against some keys of another, in one kernel call."""

    query_index: Tensor
    key_index: Tensor

    def forward(self, q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
        """Which queries `[n]`, their output `[n, H, D]` and log-sum-exp `[n, H]`."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_NH: Tensor, setting: Setting
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of the queries at `query_index` and of the keys and values at `key_index`; `out` and `lse_NH` are
        the final ones."""
        ...


def ring_attention(
    query_NHD: Tensor, key_NKD: Tensor, value_NKV: Tensor, sink_H: Tensor | None, context: Context, setting: Setting
) -> Tensor:
    """`[N, H, V]` of this rank's queries over all ranks' keys. Collective."""
    q, k, v = kernels.pad_to_one_width(query_NHD, key_NKD, value_NKV)
    out: Tensor = _Ring.apply(q, k, v, sink_H, context, setting)
    return out[..., : value_NKV.shape[-1]]


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink_H, context, setting):  # type: ignore[no-untyped-def]
        group = context.group
        exact = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros_like(q, dtype=exact)
        lse_NH = torch.full(q.shape[:2], float("-inf"), dtype=exact, device=q.device)
        block = torch.stack([k, v])  # (2, M, kv heads, D): what travels around the ring
        for turn in range(group.size):
            # send on what is here while computing with it; in turn t it is the block of rank - t
            arriving = group.pass_on(block) if turn < group.size - 1 else None
            for call in calls(context, (group.rank - turn) % group.size, setting):
                _merge(out, lse_NH, *call.forward(q, block[0], block[1], setting))
            block = block if arriving is None else arriving()
        # a sink is one more key without a value: it only takes a part of each query's weight
        if sink_H is not None:
            with_sink = torch.logaddexp(lse_NH, sink_H.to(exact))
            out *= torch.exp(lse_NH - with_sink).unsqueeze(-1)
            lse_NH = with_sink
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse_NH, sink_H)
        ctx.context, ctx.setting = context, setting
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        q, k, v, out, lse_NH, sink_H = ctx.saved_tensors
        group, setting = ctx.context.group, ctx.setting
        grad = grad.contiguous()
        dq = torch.zeros_like(q, dtype=lse_NH.dtype)
        block = torch.stack([k, v])
        grads = torch.zeros_like(block, dtype=lse_NH.dtype)  # of `block`, and travels one step behind it
        for turn in range(group.size):
            arriving = group.pass_on(block) if turn < group.size - 1 else None
            for call in calls(ctx.context, (group.rank - turn) % group.size, setting):
                of_q, of_k, of_v = call.backward(grad, q, block[0], block[1], out, lse_NH, setting)
                dq.index_add_(0, call.query_index, of_q.to(dq.dtype))
                grads[0].index_add_(0, call.key_index, of_k.to(dq.dtype))
                grads[1].index_add_(0, call.key_index, of_v.to(dq.dtype))
            grads = group.pass_on(grads)()  # also in the last turn: that brings each block's gradient home
            block = block if arriving is None else arriving()
        dk, dv = grads.to(k.dtype)
        grad_sink = None
        if sink_H is not None:
            prob_NH = torch.exp(sink_H.to(lse_NH.dtype) - lse_NH)
            grad_sink = -(prob_NH * (grad * out).sum(-1)).sum(0).to(sink_H.dtype)
        return dq.to(q.dtype), dk, dv, grad_sink, None, None


def _merge(out: Tensor, lse_NH: Tensor, index: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """In place. A query is in `index` at most once."""
    # softmax over two sets of keys: each set's output, weighted by its share of the sum of exponentials
    before = lse_NH[index]
    merged = torch.logaddexp(before, part_lse)
    old, new = (torch.exp(x - merged).unsqueeze(-1) for x in (before, part_lse))
    out[index] = out[index] * old + part * new
    lse_NH[index] = merged


@functools.lru_cache(maxsize=64)
def calls(context: Context, source: int, setting: Setting) -> list[KernelCall]:
    """What this rank computes with the keys of `source`. Cached: all layers of a microbatch ask for the same."""
    place_M = context.gathered_index() % (context.rows * context.tokens // context.group.size)
    if setting.way == "flex":
        sees = any(segments.of_context(context, setting.window, chunk) for chunk in context.owners[source])
        return [_FlexCall(context, source, setting.window)] if sees else []
    found: list[KernelCall] = []
    for chunk in context.owners[source]:  # apart, because a query is in a call only once
        members = segments.of_context(context, setting.window, chunk)
        if members and setting.way == "flash" and place_M.device.type == "cuda":
            found += _varlen_calls(members, place_M, setting.window)
        elif members:
            found += [_PaddedCall(group) for group in segments.group_by_length(members, place_M, place_M.device)[0]]
    return found


class _PaddedCall:
    """Segments of similar size, padded: flash attention on the CPU, or the definition."""

    def __init__(self, group: segments.Group):
        self._group = group
        self.query_index, self.key_index = group.query_GS.flatten(), group.key_GU.flatten()

    def _inputs(
        self, q: Tensor, k: Tensor, v: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        query_GS, key_GU, heads = self._group.query_GS, self._group.key_GU, q.shape[1]
        keys, values = (kernels.per_query_head(x, heads)[key_GU].transpose(1, 2) for x in (k, v))
        return q[query_GS].transpose(1, 2), keys, values, self._group.mask(window, q.dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
        inputs = self._inputs(q, k, v, setting.window)
        if setting.way == "flash":
            out, lse_GHS = kernels.flash_cpu_forward(*inputs, setting.scale)
        else:
            out, lse_GHS = kernels.dense_forward(*inputs, setting.scale, setting.softcap)
        real_GS = self._group.real_GS
        return self._group.query_GS[real_GS], out.transpose(1, 2)[real_GS], lse_GHS.transpose(1, 2)[real_GS]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_NH: Tensor, setting: Setting
    ) -> tuple[Tensor, Tensor, Tensor]:
        query_GS, padding_GS = self._group.query_GS, ~self._group.real_GS
        inputs = self._inputs(q, k, v, setting.window)
        grad_GHS = grad[query_GS].masked_fill(padding_GS[..., None, None], 0.0).transpose(1, 2)
        lse_GHS = lse_NH[query_GS].masked_fill(padding_GS[..., None], _NEVER).transpose(1, 2)
        out_GHS = out[query_GS].transpose(1, 2)
        if setting.way == "flash":
            grads = kernels.flash_cpu_backward(grad_GHS, *inputs, out_GHS, lse_GHS, setting.scale)
        else:
            grads = kernels.dense_backward(grad_GHS, *inputs, out_GHS, lse_GHS, setting.scale, setting.softcap)
        # (G, H, S, D) -> [G * S, H, D]; keys were repeated for the query heads, so each kv head's gradients add up
        dq, dk, dv = (x.transpose(1, 2).flatten(0, 1) for x in grads)
        kv_heads = k.shape[1]
        return dq, dk.unflatten(1, (kv_heads, -1)).sum(2), dv.unflatten(1, (kv_heads, -1)).sum(2)


def _varlen_calls(found: tuple[segments.Segment, ...], place_M: Tensor, window: int | None) -> list[KernelCall]:
    """Flash attention has one mask for all segments of a call: one call for each that occurs."""
    by_mask: dict[tuple[bool, int | None, int | None], list[segments.Segment]] = {}
    for segment in found:
        beyond = segment.ahead + segment.num_queries - segment.num_keys  # how far queries end behind keys
        if window is None:
            mask: tuple[bool, int | None, int | None] = (beyond == 0, None, None)
        else:
            mask = (False, window - 1 - beyond, beyond)
        by_mask.setdefault(mask, []).append(segment)
    return [_VarlenCall(members, place_M, mask) for mask, members in by_mask.items()]


class _VarlenCall:
    """Segments as one variable-length call. Never run on a GPU.

    Masks of flash attention are aligned at the end of queries and keys: query i of n sees key j of m when
    `i + m - n - left <= j <= i + m - n + right`.
    """

    def __init__(self, members: list[segments.Segment], place_M: Tensor, mask: tuple[bool, int | None, int | None]):
        device = place_M.device
        self._plan = segments.varlen_plan(members, place_M)
        self._causal, self._left, self._right = mask
        queries = [torch.arange(s.query, s.query + s.num_queries) for s in members]
        self.query_index = torch.cat(queries).to(device)
        assert self._plan.key_index is not None
        self.key_index = self._plan.key_index

    def _arguments(self) -> tuple[Any, ...]:
        return (*self._plan[:4], 0.0, self._causal)

    def _options(self, setting: Setting) -> dict[str, Any]:
        return {"scale": setting.scale, "window_size_left": self._left, "window_size_right": self._right}

    def forward(self, q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
        inputs = q[self.query_index], k[self.key_index], v[self.key_index]
        out, lse_Hn, *_ = torch.ops.aten._flash_attention_forward(
            *inputs, *self._arguments(), False, **self._options(setting)
        )
        return self.query_index, out, lse_Hn.t()

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_NH: Tensor, setting: Setting
    ) -> tuple[Tensor, Tensor, Tensor]:
        of_queries = grad[self.query_index], q[self.query_index], out[self.query_index]
        lse_Hn = lse_NH[self.query_index].t().contiguous()
        unused = torch.empty(0, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *of_queries[:2],
            *(k[self.key_index], v[self.key_index], of_queries[2], lse_Hn),
            *self._arguments(),
            *(torch.zeros(2, dtype=torch.uint64, device=q.device), unused),
            **self._options(setting),
        )
        return dq, dk, dv


class _FlexCall:
    """All queries of this rank and all keys of another by FlexAttention; most pairs are in blocks that are skipped.

    torch gives no way to its backward with another output and log-sum-exp than its own, so the backward runs this part
    once more and lets the gradient in through both: of the whole O = sum_i w_i O_i with w_i = exp(L_i - L), the part's
    are dO_i = w_i dO and dL_i = w_i dO (O_i - O).
    """

    def __init__(self, context: Context, source: int, window: int | None):
        self._visible = attention_flex.of_context(context, window, source)
        device = self._visible.position_N.device
        self.query_index = torch.arange(len(self._visible.position_N), device=device)
        self.key_index = torch.arange(len(self._visible.key_position_M), device=device)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
        out, lse_HN = attention_flex.attend(q, k, v, None, self._visible, setting.scale, setting.softcap)
        return out, lse_HN.t()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
        return self.query_index, *self._attend(q, k, v, setting)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_NH: Tensor, setting: Setting
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            q, k, v = leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            part, part_lse_NH = self._attend(q, k, v, setting)
        share_NH = torch.exp(part_lse_NH.detach() - lse_NH)
        of_out = grad * share_NH.unsqueeze(-1)
        of_lse = (of_out * (part.detach() - out)).sum(-1)
        grads = (of_out.to(part.dtype), of_lse.to(part_lse_NH.dtype))
        dq, dk, dv = torch.autograd.grad((part, part_lse_NH), leaves, grads)
        return dq, dk, dv
