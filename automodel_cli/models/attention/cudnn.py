"""Variable-length attention of cuDNN, aten's own operator: causal documents, in one call for all of them.

Selected for layers without windows, sinks and other keys than queries, as torch's `varlen_attn` does since 2.15. Other
layers run in torch's FlashAttention-2. Older versions of torch never select it: with 2.13 the backward of long
documents reads out of bounds (pytorch pull request 186142), and 2.14 has no causal mask and no grouped heads for it.

cuDNN builds an execution plan for each number of documents and each longest document. Both are rounded up to a power of
two, so that packed batches repeat few plans. Added documents are empty.

The operator has NEVER been run on a GPU here. Run tests/gpu before you rely on it.

Shapes: N tokens, H query heads, K KV heads, D head width of queries and keys, V value width.
"""

from __future__ import annotations

import re
from typing import cast

import torch
from torch import Tensor

from automodel_cli.distributed.typed_torch import Ctx, Function
from automodel_cli.models.attention.kernels import VarlenPlan

_TORCH = (2, 15)
_CUDNN = 91800
_CUDNN_SHORT = 92400  # the first version for documents of at most _SHORT tokens
_SHORT = 128
_CAPABILITIES = (9, 10)
_WIDEST = 128  # in forward and backward on all GPUs


def why_unavailable(capability: tuple[int, int] | None) -> str:
    """Return why torch and cuDNN of this process do not support the operator on a GPU, or an empty string.

    `capability` is the compute capability, None without a GPU.
    """
    if capability is None:
        return "no CUDA device is available"
    release = tuple(int(number) for number in re.findall(r"\d+", torch.__version__)[:2])
    if release < _TORCH:
        return f"it requires torch {'.'.join(map(str, _TORCH))} for causal documents, and this is {torch.__version__}"
    if capability[0] not in _CAPABILITIES:
        requested = " or ".join(f"{major}.x" for major in _CAPABILITIES)
        return f"it requires compute capability {requested}, and the GPU has {capability[0]}.{capability[1]}"
    version = torch.backends.cudnn.version()
    if version is None or version < _CUDNN:
        return f"it requires cuDNN {_CUDNN}, and the version is {version}"
    return ""


def supports(query: Tensor, value: Tensor, plan: VarlenPlan, sink_H: Tensor | None, window: int | None) -> bool:
    """Return whether the operator computes a layer with these flat tensors `[N, heads, width]`."""
    widths = query.shape[-1], value.shape[-1]
    long_enough = plan.max_q > _SHORT or (torch.backends.cudnn.version() or 0) >= _CUDNN_SHORT
    sees_own_document = plan.key_index is None and plan.cu_q is plan.cu_k  # else the mask would begin at the wrong end
    narrow = max(widths) <= _WIDEST and not any(width % 8 for width in widths)
    return long_enough and sees_own_document and narrow and sink_H is None and (window is None or window >= plan.max_q)


def varlen_cudnn(query_NHD: Tensor, key_NKD: Tensor, value_NKV: Tensor, plan: VarlenPlan, scale: float) -> Tensor:
    """Run all documents in one call and return `[N, H, V]`."""
    cu, longest = _rounded_up(plan)
    out_NHV: Tensor = _VarlenCuDNN.apply(query_NHD, key_NKD, value_NKV, cu, longest, scale)
    return out_NHV


def _rounded_up(plan: VarlenPlan) -> tuple[Tensor, int]:
    """Return the bounds of 2^i documents, of which the last ones are empty, and 2^j, at least the longest document.

    All layers of a microbatch share the bounds.
    """
    cu = plan.cu_q
    known: Tensor | None = getattr(cu, "_automodel_rounded_up", None)
    if known is None:
        added = _power_of_two(len(cu) - 1) - (len(cu) - 1)
        known = torch.cat([cu, cu[-1:].expand(added)]) if added else cu
        cu._automodel_rounded_up = known  # type: ignore[attr-defined]
    return known, _power_of_two(plan.max_q)


def _power_of_two(number: int) -> int:
    return 1 << max(number - 1, 0).bit_length()


class _VarlenCuDNN(Function):
    """aten's cuDNN attention. The log-sum-exp and the two random numbers are passed on as they are."""

    @staticmethod
    def forward(ctx: Ctx, q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, scale: float) -> Tensor:
        out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._cudnn_attention_forward(
            *(q, k, v, None, cu, cu, longest, longest, True, 0.0, True, False), scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse, cu, seed, offset)
        ctx.args = (longest, scale)
        return cast("Tensor", out)

    @staticmethod
    def backward(ctx: Ctx, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, cu, seed, offset = ctx.saved_tensors
        longest, scale = ctx.args
        grads = torch.ops.aten._cudnn_attention_backward(
            *(grad_out.contiguous(), q, k, v, out, lse, seed, offset, None, cu, cu, longest, longest, 0.0, True),
            scale=scale,
        )
        return (*grads, None, None, None)
