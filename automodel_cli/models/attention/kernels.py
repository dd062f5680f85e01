"""Flash attention over groups of segments (`dense.py`) on a CPU, and of variable length on CUDA.

Attention sinks need no special kernel. For a flash output O and log-sum-exp L: L' = logaddexp(L, sink) and O' = O *
exp(L - L'). Given (O', L'), the ordinary flash backward recomputes P = exp(S - L') and rowsum(dO * O'). Therefore dq,
dk and dv are exact, and dsink = -sum exp(sink - L') * rowsum(dO * O').

The CUDA path has NEVER been run on a GPU. Only its operator signatures were checked. Run tests/gpu before you rely on
it.

Shapes: G segments of a group, H query heads (KV heads are repeated, except in K), K KV heads, S queries and U keys of a
segment, D head width, V value width, N queries and M keys of a call.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_cli.distributed.typed_torch import Ctx, Function

_FLASH_MAX_HEAD_DIM = 256  # of the CUDA kernel


def picked(x_MKD: Tensor, index: Tensor) -> Tensor:
    """Return `x_MKD[index]`. Gradients of a repeated index are summed in at least fp32.

    The keys of a shared prefix receive one gradient per response, and bf16 sums of many terms lose precision.
    """
    if x_MKD.dtype in (torch.float32, torch.float64) or not x_MKD.requires_grad:
        return x_MKD.index_select(0, index)
    out: Tensor = _Picked.apply(x_MKD, index)
    return out


class _Picked(Function):
    """index_select of bf16 or fp16 tensors with an fp32 sum in backward."""

    @staticmethod
    def forward(ctx: Ctx, x_MKD: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.of = x_MKD.shape[0], x_MKD.dtype
        return x_MKD.index_select(0, index)

    @staticmethod
    def backward(ctx: Ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        (index,), (num_tokens, dtype) = ctx.saved_tensors, ctx.of
        return _summed_at(index, grad, num_tokens, dtype), None


def _summed_at(index: Tensor, grad: Tensor, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """Sum gradients by index in at least fp32 and return them in `dtype`."""
    exact = torch.promote_types(grad.dtype, torch.float32)
    # [n, K, D] gradients at `index` -> [M, K, D]. A prompt token with 8 responses gets the sum of 8 gradients.
    total = torch.zeros(num_tokens, *grad.shape[1:], dtype=exact, device=grad.device)
    return total.index_add_(0, index, grad.to(exact)).to(dtype)


def per_query_head(x: Tensor, heads: int) -> Tensor:
    """Repeat KV heads (dim 1) so that every query head has its own."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def pad_to_one_width(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad query, key and value to one head width, which flash kernels require.

    Zeros in q and k do not change the scores. Callers slice the padded columns of the output off.
    """
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
    """Run torch's CPU flash kernel. Causal if `mask` is None."""
    q, k, v = pad_to_one_width(query_GHSD, key_GHUD, value_GHUV)
    out: Tensor = _SinkFlashCPU.apply(q, k, v, sink_H, mask, scale)
    return out[..., : value_GHUV.shape[-1]]


@functools.cache
def cpu_lse_is_heads_first() -> bool:
    """Return whether the CPU kernel's log-sum-exp is `[B, H, S]` instead of `[B, S, H]`.

    Builds of torch differ. Detected once, with H != S.
    """
    x = torch.zeros(1, 2, 3, 8, device="cpu")
    return bool(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, x, x, 0.0, True)[1].shape[1] == 2)


def flash_cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output and log-sum-exp `[G, H, S]` without autograd. Causal if `mask` is None."""
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
    """Return the gradients of query, key and value.

    `out` and `lse` belong to all keys of the queries. The given keys may be a part of them, as in ring attention.
    """
    lse = (lse if cpu_lse_is_heads_first() else lse.transpose(1, 2)).contiguous()
    grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, lse, 0.0, mask is None, attn_mask=mask, scale=scale
    )
    return grads


class _SinkFlashCPU(Function):
    """CPU flash attention with optional sinks. Causal if `mask` is None."""

    @staticmethod
    def forward(
        ctx: Ctx, q: Tensor, k: Tensor, v: Tensor, sink_H: Tensor | None, mask: Tensor | None, scale: float
    ) -> Tensor:
        out, lse_GHS = flash_cpu_forward(q, k, v, mask, scale)
        if sink_H is not None:
            # The kernel knows no sinks, so its output is rescaled: the softmax over one more key has the denominator
            # e^L + e^sink.
            with_sink = torch.logaddexp(lse_GHS, sink_H.float().view(1, -1, 1))
            out = (out * torch.exp(lse_GHS - with_sink).unsqueeze(-1)).to(q.dtype)
            lse_GHS = with_sink
        ctx.save_for_backward(q, k, v, out, lse_GHS, sink_H, mask)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Ctx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse_GHS, sink_H, mask = ctx.saved_tensors
        dq, dk, dv = flash_cpu_backward(grad_out, q, k, v, mask, out, lse_GHS, ctx.scale)
        grad_sink = None
        if sink_H is not None:
            prob_GHS = torch.exp(sink_H.float().view(1, -1, 1) - lse_GHS)
            grad_sink = -(prob_GHS * (grad_out.float() * out.float()).sum(-1)).sum((0, 2)).to(sink_H.dtype)
        return dq, dk, dv, grad_sink, None, None


def why_not_flash_cpu(softcap: float | None) -> str:
    """Return the reason why torch's CPU flash kernel does not support a layer, or an empty string."""
    return "" if softcap is None else f"soft caps (here {softcap:g})"


def why_not_flash_cuda(query: Tensor, value: Tensor, softcap: float | None) -> str:
    """Return the reason why CUDA flash kernels do not support these tensors, or an empty string."""
    if softcap is not None:
        return f"soft caps (here {softcap:g})"
    if query.dtype not in (torch.bfloat16, torch.float16):
        return f"{str(query.dtype).removeprefix('torch.')} (bfloat16 or float16 is required)"
    widest = max(query.shape[-1], value.shape[-1])
    if widest > _FLASH_MAX_HEAD_DIM or widest % 8:
        return f"heads of width {widest} (a multiple of 8, at most {_FLASH_MAX_HEAD_DIM}, is required)"
    return ""


class VarlenPlan(NamedTuple):
    """Segments of one variable-length call, causal and aligned at the end of each segment.

    Queries are used in their order. Keys are gathered by `key_index`, or used in their order if it is None.
    """

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
    """Run all segments in one call and return `[N, H, V]`.

    `pads`: the kernel requires one head width. Never run on a GPU (see the module docstring).
    """
    q, k, v = pad_to_one_width(query_NHD, key_MKD, value_MKV) if pads else (query_NHD, key_MKD, value_MKV)
    out_NHV: Tensor = _SinkVarlenCUDA.apply(q, k, v, sink_H, *plan, scale, window)
    return out_NHV[..., : value_MKV.shape[-1]]


class _SinkVarlenCUDA(Function):
    """aten's variable-length flash attention with optional sinks.

    q is `[N, H, D]`, k and v are `[M, K, D]`, cu is int32 `[segments + 1]`, the log-sum-exp is fp32 `[H, N]`. Causal,
    aligned at the end of each segment. A window of W keys is `window_size_left = W - 1, window_size_right = 0`.
    Backward gathers keys and values again: saving them would store a shared prompt once per response.
    """

    @staticmethod
    def forward(
        ctx: Ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink_H: Tensor | None,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        key_index: Tensor | None,
        scale: float,
        window: int | None,
    ) -> Tensor:
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
        return cast("Tensor", out)

    @staticmethod
    def backward(ctx: Ctx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
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
