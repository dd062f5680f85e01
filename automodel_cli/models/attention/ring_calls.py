"""Kernel calls of ring attention: local queries with the keys of one rank, and the merge of their results.

Shapes: N local queries and N keys of each rank, H heads, K KV heads, D one head width for queries, keys and values, n
and m queries and keys of a call.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from automodel_cli.models.attention import dense, flex_visibility
from automodel_cli.models.attention import flex as attention_flex
from automodel_cli.models.attention import kernels as kernels
from automodel_cli.models.attention import varlen_segments as segments
from automodel_cli.models.context_parallel_layout import Context

_PADDING_LSE = 1e30  # so large that every probability is 0


class Setting(NamedTuple):
    """Attention settings of one layer. `way`: see `kernel_selection.way`."""

    scale: float
    window: int | None
    softcap: float | None
    way: str


class KernelCall(Protocol):
    """Some local queries against some keys of a rank, in one kernel call."""

    query_index: Tensor
    key_index: Tensor

    def forward(self, q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
        """Return the indices of the queries `[n]`, their output `[n, H, D]` and log-sum-exp `[n, H]`."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_NH: Tensor, setting: Setting
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the queries at `query_index` and of the keys and values at `key_index`.

        `out` and `lse_NH` are final, after all keys.
        """
        ...


@functools.lru_cache(maxsize=64)
def calls(context: Context, source: int, setting: Setting) -> list[KernelCall]:
    """Return the kernel calls of this rank with the keys of rank `source`.

    Cached, because all layers of a microbatch need the same.
    """
    # Keys of one rank are indexed from 0: position in the gathered keys modulo the tokens of a rank.
    key_position_M = context.gathered_index() % (context.rows * context.tokens // context.group.size)
    if setting.way == "flex":
        sees = any(segments.context_segments(context, setting.window, chunk) for chunk in context.owners[source])
        return [_FlexCall(context, source, setting.window)] if sees else []
    # Keys of a later chunk than all queries are masked. Such pairs of chunks give no segment and no call.
    kernel_calls: list[KernelCall] = []
    for chunk in context.owners[source]:  # one call per chunk, because `_merge` needs unique queries
        members = segments.context_segments(context, setting.window, chunk)
        if members and setting.way == "flash" and key_position_M.device.type == "cuda":
            kernel_calls += _varlen_calls(members, key_position_M, setting.window)
        elif members:
            kernel_calls += [
                _PaddedCall(group)
                for group in segments.group_by_length(members, key_position_M, key_position_M.device)[0]
            ]
    return kernel_calls


class _PaddedCall:
    """Segments of similar size, padded to one length: CPU flash attention or the definition."""

    def __init__(self, group: segments.Group):
        self._group = group
        self.query_index, self.key_index = group.query_GS.flatten(), group.key_GU.flatten()

    def _inputs(
        self, q: Tensor, k: Tensor, v: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        query_GS, key_GU, heads = self._group.query_GS, self._group.key_GU, q.shape[1]
        # [M, K, D] -> [M, H, D] (repeated KV heads) -> [G, U, H, D] -> [G, H, U, D]
        keys, values = (kernels.per_query_head(x, heads)[key_GU].transpose(1, 2) for x in (k, v))
        return q[query_GS].transpose(1, 2), keys, values, self._group.mask(window, q.dtype)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
        inputs = self._inputs(q, k, v, setting.window)
        if setting.way == "flash":
            out, lse_GHS = kernels.flash_cpu_forward(*inputs, setting.scale)
        else:
            out, lse_GHS = dense.dense_forward(*inputs, setting.scale, setting.softcap)
        real_GS = self._group.real_GS
        # Padding queries repeat a real one. They are dropped, so that `_merge` gets each query once.
        return self._group.query_GS[real_GS], out.transpose(1, 2)[real_GS], lse_GHS.transpose(1, 2)[real_GS]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_NH: Tensor, setting: Setting
    ) -> tuple[Tensor, Tensor, Tensor]:
        query_GS, padding_GS = self._group.query_GS, ~self._group.real_GS
        inputs = self._inputs(q, k, v, setting.window)
        # Padding queries get a zero gradient, and a log-sum-exp for which every probability is 0. They add nothing to
        # the gradients of the keys.
        grad_GHS = grad[query_GS].masked_fill(padding_GS[..., None, None], 0.0).transpose(1, 2)
        lse_GHS = lse_NH[query_GS].masked_fill(padding_GS[..., None], _PADDING_LSE).transpose(1, 2)
        out_GHS = out[query_GS].transpose(1, 2)
        if setting.way == "flash":
            grads = kernels.flash_cpu_backward(grad_GHS, *inputs, out_GHS, lse_GHS, setting.scale)
        else:
            grads = dense.dense_backward(grad_GHS, *inputs, out_GHS, lse_GHS, setting.scale, setting.softcap)
        # (G, H, S, D) -> [G * S, H, D]. Keys were repeated for the query heads, so their gradients are summed.
        dq, dk, dv = (x.transpose(1, 2).flatten(0, 1) for x in grads)
        kv_heads = k.shape[1]
        return dq, dk.unflatten(1, (kv_heads, -1)).sum(2), dv.unflatten(1, (kv_heads, -1)).sum(2)


def _varlen_calls(
    kernel_calls: tuple[segments.Segment, ...], key_position_M: Tensor, window: int | None
) -> list[KernelCall]:
    """Return one call per mask, because flash attention has one mask for all segments of a call."""
    by_mask: dict[tuple[bool, int | None, int | None], list[segments.Segment]] = {}
    for segment in kernel_calls:
        # Example: rows of 8 tokens, 2 ranks. For queries 6, 7 and keys 6, 7, ahead = 0 and beyond = 0: causal. For keys
        # 4, 5, ahead = 2 and beyond = 2: all keys precede all queries, so no mask is needed.
        beyond = segment.ahead + segment.num_queries - segment.num_keys  # distance from the last key to the last query
        if window is None:
            mask: tuple[bool, int | None, int | None] = (beyond == 0, None, None)
        else:
            mask = (False, window - 1 - beyond, beyond)
        by_mask.setdefault(mask, []).append(segment)
    return [_VarlenCall(members, key_position_M, mask) for mask, members in by_mask.items()]


class _VarlenCall:
    """Segments as one variable-length call. Never run on a GPU.

    Masks of flash attention are aligned at the end of queries and keys. Query i of n sees key j of m if `i + m - n -
    left <= j <= i + m - n + right`.
    """

    def __init__(
        self, members: list[segments.Segment], key_position_M: Tensor, mask: tuple[bool, int | None, int | None]
    ):
        device = key_position_M.device
        self._plan = segments.varlen_plan(members, key_position_M)
        self._causal, self._left, self._right = mask
        queries = [torch.arange(s.query, s.query + s.num_queries) for s in members]
        self.query_index = torch.cat(queries).to(device)
        assert self._plan.key_index is not None
        self.key_index = self._plan.key_index

    def _arguments(self) -> tuple[object, ...]:
        return (*self._plan[:4], 0.0, self._causal)

    def _options(self, setting: Setting) -> dict[str, object]:
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
        query_inputs = grad[self.query_index], q[self.query_index], out[self.query_index]
        lse_Hn = lse_NH[self.query_index].t().contiguous()
        unused = torch.empty(0, device=q.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *query_inputs[:2],
            *(k[self.key_index], v[self.key_index], query_inputs[2], lse_Hn),
            *self._arguments(),
            *(torch.zeros(2, dtype=torch.uint64, device=q.device), unused),
            **self._options(setting),
        )
        return dq, dk, dv


class _FlexCall:
    """All local queries against all keys of a rank with FlexAttention. Most blocks are skipped.

    The backward of FlexAttention accepts only its own output and log-sum-exp. This backward therefore recomputes the
    part and passes gradients through both. For O = sum_i w_i O_i with w_i = exp(L_i - L), the gradients of part i are
    dO_i = w_i dO and dL_i = w_i dO (O_i - O).
    """

    def __init__(self, context: Context, source: int, window: int | None):
        self._visible = flex_visibility.context_visibility(context, window, source)
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
        # Share w_i of these keys in the softmax over all keys.
        share_NH = torch.exp(part_lse_NH.detach() - lse_NH)
        grad_part = grad * share_NH.unsqueeze(-1)
        # The derivative of w_i is w_i (dL_i - dL). Summed over the parts, the term of L is w_i O, hence the difference
        # O_i - O.
        grad_part_lse = (grad_part * (part.detach() - out)).sum(-1)
        grads = (grad_part.to(part.dtype), grad_part_lse.to(part_lse_NH.dtype))
        dq, dk, dv = torch.autograd.grad((part, part_lse_NH), leaves, grads)
        return dq, dk, dv


def merge(out: Tensor, lse_NH: Tensor, index: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a partial result into `out` and `lse_NH` in place. A query occurs at most once in `index`."""
    # Softmax over two sets of keys: weight each output by its share of the sum of exponentials.
    before = lse_NH[index]
    merged = torch.logaddexp(before, part_lse)
    old, new = (torch.exp(x - merged).unsqueeze(-1) for x in (before, part_lse))
    out[index] = out[index] * old + part * new
    lse_NH[index] = merged
