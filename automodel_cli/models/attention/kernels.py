"""What computes attention over groups of segments: CPU flash, CUDA variable-length flash, and the dense definition.

A segment is a run of queries and the keys that they may see (`attention_segments.py`). Its query i sees key j when
`i + ahead - window < j <= i + ahead`, where `ahead` is how far its first query lies behind its first key; a whole
document has ahead 0.

Sinks need no special kernel. With a flash output O and log-sum-exp L: L' = logaddexp(L, sink), O' = O * exp(L - L').
The ordinary flash backward given (O', L') recomputes P = exp(S - L') and rowsum(dO * O'), so dq, dk and dv are exact,
and dsink = -sum exp(sink - L') * rowsum(dO * O').

The CUDA path has NEVER been run on a GPU: only its operator signatures were checked. Run tests/gpu before relying on
it.

Shapes: G segments of a group, H heads (kv heads repeated, except where K is written), S queries, U keys, D head width,
V value width, N queries and M keys of a whole call.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_FLASH_MAX_HEAD_DIM = 256  # of the CUDA kernel


@functools.lru_cache(maxsize=32)
def visible_mask(
    num_queries: int,
    num_keys: tuple[int, ...],
    ahead: tuple[int, ...],
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor | None:
    """Additive `[G, 1, S, U]` (`[S, U]` where all segments agree): 0 where a query sees the key, -inf elsewhere. None
    where plain causal attention is the same. Cached: layers repeat few sizes.

    `num_keys` and `ahead` of each segment. A query without any key, which only padding is, sees the first one.
    """
    longest, shortest = max(num_keys), min(num_keys)
    if not any(ahead) and num_queries == longest and (window is None or window >= num_queries):
        return None
    query, key = torch.arange(num_queries, device=device), torch.arange(longest, device=device)
    if len(set(ahead)) == 1 and shortest == longest:
        distance = query[:, None] + ahead[0] - key
        visible = distance >= 0
    else:
        distance = (query + torch.tensor(ahead, device=device)[:, None])[:, None, :, None] - key
        visible = (distance >= 0) & (key < torch.tensor(num_keys, device=device)[:, None, None, None])
    if window is not None:
        visible &= distance < window
    visible[..., 0] |= ~visible.any(-1)
    return torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))


def dense(
    query_GHSD: Tensor,
    key_GHUD: Tensor,
    value_GHUV: Tensor,
    mask: Tensor | None = None,
    *,
    sink_H: Tensor | None = None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """The definition, with O(S U) scores in fp32: `softmax([softcap(q k^T scale) + mask, sink]) v`. Causal where `mask`
    is None."""
    scores_GHSU = _scores(query_GHSD, key_GHUD, mask, scale, softcap)
    if sink_H is not None:
        column = sink_H.float().view(1, -1, 1, 1).expand(*scores_GHSU.shape[:3], 1)
        probs = torch.cat([scores_GHSU, column], -1).softmax(-1)[..., :-1]
    else:
        probs = scores_GHSU.softmax(-1)
    return probs.to(value_GHUV.dtype) @ value_GHUV


def dense_bytes(dtype: torch.dtype, softcap: float | None) -> int:
    """Bytes that `dense` keeps for its backward of each pair of query and key: probabilities in float32, in `dtype`
    where that is narrower, and tanh."""
    exact = torch.float32.itemsize
    return exact * (1 if softcap is None else 2) + (dtype.itemsize if dtype.itemsize < exact else 0)


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    scores = (query @ key.transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None:
        above = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu_(1)
        return scores.masked_fill(above, float("-inf"))
    return scores + mask


def dense_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp `[G, H, S]` of the definition, outside of autograd."""
    scores = _scores(query, key, mask, scale, softcap)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.unsqueeze(-1)) @ value.float(), lse


def dense_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, given the output and log-sum-exp of all keys, of which these may be a part."""
    scores = _scores(query, key, mask, scale, softcap)
    probs = torch.exp(scores - lse.unsqueeze(-1))
    grad, out = grad.float(), out.float()
    dscores = probs * (grad @ value.float().transpose(2, 3) - (grad * out).sum(-1, keepdim=True))
    if softcap is not None:
        dscores = dscores * (1 - (scores.masked_fill(probs == 0, 0.0) / softcap).square())
    dscores = dscores * scale
    return dscores @ key.float(), dscores.transpose(2, 3) @ query.float(), probs.transpose(2, 3) @ grad


def picked(x_MKD: Tensor, index: Tensor) -> Tensor:
    """`x_MKD[index]`. What comes back for a token that is picked several times is summed in float32 at least: a prefix
    of a group has a gradient from each response."""
    if x_MKD.dtype in (torch.float32, torch.float64) or not x_MKD.requires_grad:
        return x_MKD.index_select(0, index)
    out: Tensor = _Picked.apply(x_MKD, index)
    return out


class _Picked(torch.autograd.Function):
    """index_select of narrow floats, with an exact sum in its backward."""

    @staticmethod
    def forward(ctx, x_MKD, index):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(index)
        ctx.of = x_MKD.shape[0], x_MKD.dtype
        return x_MKD.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (index,), (num_tokens, dtype) = ctx.saved_tensors, ctx.of
        return _summed_at(index, grad, num_tokens, dtype), None


def _summed_at(index: Tensor, grad: Tensor, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """Gradients of picked tokens, summed by token in float32 at least."""
    exact = torch.promote_types(grad.dtype, torch.float32)
    total = torch.zeros(num_tokens, *grad.shape[1:], dtype=exact, device=grad.device)
    return total.index_add_(0, index, grad.to(exact)).to(dtype)


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """Grouped kv heads (dim 1), repeated."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def pad_to_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Flash kernels want one head width. Zeros in q and k add nothing to scores; padded value columns are cut off."""
    width = max(query.shape[-1], value.shape[-1])

    def pad(x: Tensor) -> Tensor:
        return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))

    return pad(query), pad(key), pad(value)


def flash_cpu(
    query_GHSD: Tensor,
    key_GHUD: Tensor,
    value_GHUV: Tensor,
    mask: Tensor | None = None,
    *,
    sink_H: Tensor | None = None,
    scale: float,
) -> Tensor:
    """torch's CPU flash kernel; causal where `mask` is None."""
    q, k, v = pad_to_one_width(query_GHSD, key_GHUD, value_GHUV)
    out: Tensor = _SinkFlashCPU.apply(q, k, v, sink_H, mask, scale)
    return out[..., : value_GHUV.shape[-1]]


@functools.cache
def cpu_lse_is_heads_first() -> bool:
    """Builds of torch return the log-sum-exp as [B, H, S] or [B, S, H]; asked once with H != S."""
    x = torch.zeros(1, 2, 3, 8, device="cpu")
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, 0.0, True)[1].shape[1] == 2


def flash_cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp `[G, H, S]`, outside of autograd; causal where `mask` is None."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, mask is None, attn_mask=mask, scale=scale
    )
    return out, lse if cpu_lse_is_heads_first() else lse.transpose(1, 2)


def flash_cpu_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, given the output and log-sum-exp of all keys, of which these may be a part."""
    lse = (lse if cpu_lse_is_heads_first() else lse.transpose(1, 2)).contiguous()
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, lse, 0.0, mask is None, attn_mask=mask, scale=scale
    )
    return grads


class _SinkFlashCPU(torch.autograd.Function):
    """Flash attention with optional sinks on CPU; causal where `mask` is None."""

    @staticmethod
    def forward(ctx, q, k, v, sink_H, mask, scale):  # type: ignore[no-untyped-def]
        out, lse_GHS = flash_cpu_forward(q, k, v, mask, scale)
        if sink_H is not None:
            with_sink = torch.logaddexp(lse_GHS, sink_H.float().view(1, -1, 1))
            out = (out * torch.exp(lse_GHS - with_sink).unsqueeze(-1)).to(q.dtype)
            lse_GHS = with_sink
        ctx.save_for_backward(q, k, v, out, lse_GHS, sink_H, mask)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
        q, k, v, out, lse_GHS, sink_H, mask = ctx.saved_tensors
        dq, dk, dv = flash_cpu_backward(grad_out, q, k, v, mask, out, lse_GHS, ctx.scale)
        grad_sink = None
        if sink_H is not None:
            prob_GHS = torch.exp(sink_H.float().view(1, -1, 1) - lse_GHS)
            grad_sink = -(prob_GHS * (grad_out.float() * out.float()).sum(-1)).sum((0, 2)).to(sink_H.dtype)
        return dq, dk, dv, grad_sink, None, None


def why_not_flash_cpu(softcap: float | None) -> str:
    """What keeps torch's CPU flash kernel from a layer, for a sentence; empty where nothing does."""
    return "" if softcap is None else f"soft caps (here {softcap:g})"


def why_not_flash_cuda(query: Tensor, value: Tensor, softcap: float | None) -> str:
    """What keeps CUDA's flash kernel from these tensors, for a sentence; empty where nothing does."""
    if softcap is not None:
        return f"soft caps (here {softcap:g})"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"{str(query.dtype).removeprefix('torch.')} (bfloat16 or float16 is required)"
    widest = max(query.shape[-1], value.shape[-1])
    if widest > _FLASH_MAX_HEAD_DIM or widest % 8:
        return f"heads of width {widest} (a multiple of 8, at most {_FLASH_MAX_HEAD_DIM}, is required)"
    return ""


class VarlenPlan(NamedTuple):
    """Segments for one variable-length call, causal and aligned at each segment's end. Queries as they lie; keys picked
    by `key_index`, None: as they lie."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int
    key_index: Tensor | None


def varlen_cuda(
    query_NHD: Tensor,
    key_MKD: Tensor,
    value_MKV: Tensor,
    plan: VarlenPlan,
    sink_H: Tensor | None,
    scale: float,
    window: int | None,
    *,
    pads: bool,
) -> Tensor:
    """All segments in one call: `[N, H, V]`. `pads`: the kernel wants one head width. Never run on a GPU (see the
    module's docstring)."""
    q, k, v = pad_to_one_width(query_NHD, key_MKD, value_MKV) if pads else (query_NHD, key_MKD, value_MKV)
    out_NHV: Tensor = _SinkVarlenCUDA.apply(q, k, v, sink_H, *plan, scale, window)
    return out_NHV[..., : value_MKV.shape[-1]]


class _SinkVarlenCUDA(torch.autograd.Function):
    """aten's variable-length flash attention with optional sinks.

    q `[N, H, D]`, k and v `[M, K, D]`, cu int32 `[segments + 1]`, log-sum-exp fp32 `[H, N]`. Causal, aligned at the end
    of each segment. A window of W keys is `window_size_left = W - 1, window_size_right = 0`. Keys and values that are
    picked by `key_index` are picked again in the backward: a long prompt that many responses share would be kept once
    for each of them.
    """

    @staticmethod
    def forward(ctx, q, k, v, sink_H, cu_q, cu_k, max_q, max_k, key_index, scale, window):  # type: ignore[no-untyped-def]
        left, right = (None, None) if window is None else (window - 1, 0)
        keys, values = (k, v) if key_index is None else (k.index_select(0, key_index), v.index_select(0, key_index))
        out, lse, rng_state, _, _ = torch.ops.aten._flash_attention_forward(
            *(q, keys, values, cu_q, cu_k, max_q, max_k, 0.0, window is None, False),
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        if sink_H is not None:
            with_sink = torch.logaddexp(lse, sink_H.float()[:, None])
            out = (out * torch.exp(lse - with_sink).t().unsqueeze(-1)).to(q.dtype)
            lse = with_sink
        ctx.save_for_backward(q, k, v, out, lse, sink_H, cu_q, cu_k, key_index, rng_state)
        ctx.args = (max_q, max_k, scale, left, right)
        return out

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def]
        q, k, v, out, lse, sink_H, cu_q, cu_k, key_index, rng_state = ctx.saved_tensors
        max_q, max_k, scale, left, right = ctx.args
        unused = torch.empty(0, device=q.device)
        keys, values = (k, v) if key_index is None else (k.index_select(0, key_index), v.index_select(0, key_index))
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            *(grad_out.contiguous(), q, keys, values, out, lse, cu_q, cu_k, max_q, max_k, 0.0, left is None),
            *(rng_state, unused),
            scale=scale,
            window_size_left=left,
            window_size_right=right,
        )
        if key_index is not None:
            dk, dv = (_summed_at(key_index, grad, len(k), k.dtype) for grad in (dk, dv))
        grad_sink = None
        if sink_H is not None:
            prob_HN = torch.exp(sink_H.float()[:, None] - lse)
            grad_sink = -(prob_HN * (grad_out.float() * out.float()).sum(-1).t()).sum(1).to(sink_H.dtype)
        return dq, dk, dv, grad_sink, None, None, None, None, None, None, None
