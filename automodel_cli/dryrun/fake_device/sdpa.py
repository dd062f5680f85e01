"""torch's `scaled_dot_product_attention` as a CUDA device would run it, for `model.attn_implementation=sdpa`.

For torch's C++ tensors without values are on the meta device, where it knows one way: products with a softmax between
them, tokens x tokens for every head. On CUDA it takes FlashAttention where there is no mask, else the memory-efficient
kernel, which reads the mask as numbers of the queries' dtype, made anew by every call and kept for its backward: tokens
x tokens once a row. By the rules of aten/native/transformers/cuda/sdp_utils.cpp; cuDNN, which torch prefers on some
devices, keeps as much.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from automodel_cli.dryrun.fake_device.torch_compat import FakeTensor

_aten = torch.ops.aten
_WIDEST_FLASH = 256
_ALIGNED = 8  # numbers of 16 bits of a head, which both kernels want a multiple of


def on_cuda(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`own`, torch's function, with the kernel that a device would take for tensors that say they are on one."""

    def attention(
        query_BHTD: Tensor,
        key_BKSD: Tensor,
        value_BKSV: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        qkv = (query_BHTD, key_BKSD, value_BKSV)
        way = kernel(*qkv, attn_mask, enable_gqa) if isinstance(query_BHTD, FakeTensor) and query_BHTD.is_cuda else None
        if way == "flash":
            out: Tensor = _aten._scaled_dot_product_flash_attention(*qkv, dropout_p, is_causal, scale=scale)[0]
        elif way == "efficient":
            bias = None if attn_mask is None else _as_numbers(attn_mask, query_BHTD)
            keeps = any(x.requires_grad for x in qkv) and torch.is_grad_enabled()
            given = (*qkv, bias, keeps, dropout_p, is_causal)
            out = _aten._scaled_dot_product_efficient_attention(*given, scale=scale)[0]
        else:
            out = own(*qkv, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return out

    return attention


def kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, shares_heads: bool) -> str | None:
    """ "flash", "efficient", or None where a device too has only products with a softmax between them."""
    short = query.dtype in (torch.bfloat16, torch.float16)
    width, value_width = query.shape[-1], value.shape[-1]
    aligned = width % _ALIGNED == value_width % _ALIGNED == 0
    if mask is None and short and aligned and width == value_width <= _WIDEST_FLASH:
        return "flash"
    whole = key.shape[1] == query.shape[1] and not shares_heads
    return "efficient" if whole and aligned and (short or query.dtype == torch.float32) else None


def _as_numbers(mask: Tensor, query_BHTD: Tensor) -> Tensor:
    """As aten does it for every call: 0 where a key is seen and -inf elsewhere, for all heads without a copy."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query_BHTD.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(*query_BHTD.shape[:-1], mask.shape[-1])
