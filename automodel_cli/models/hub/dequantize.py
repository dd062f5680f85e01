"""Quantized checkpoints (4 or 8 bits) as lazy tensors that dequantize the requested part.

The tensors have the plain hub names before the converter of transformers reads them. Sharding, fused experts and
pipeline stages therefore work as for any checkpoint, and a rank reads and dequantizes only its part.

mxfp4 (GPT-OSS): `X_blocks` uint8 `[E, R, G, 16]` contains two e2m1 values per byte, low nibble first. `X_scales` uint8
`[E, R, G]` contains one exponent per 32 values. The value is `e2m1 * 2**(scale - 127)` (OCP Microscaling Formats 1.0).
The parameter `X` of transformers is the transpose `[E, 32 G, R]`. Example: nibble 3 is 1.5. With scale 128 the value is
1.5 * 2 = 3.

fp8 (DeepSeek-V3): `X.weight` float8_e4m3fn `[O, I]` times `X.weight_scale_inv` fp32 `[ceil(O/b0), ceil(I/b1)]`, one
scale per block.

compressed-tensors, which exports of quantization-aware training have: see `compressed_tensors.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.hub import compressed_tensors
from automodel_cli.models.hub.compressed_tensors import Quantization
from automodel_cli.models.hub.lazy_tensor import LazyTensor, StoredTensor

_E8M0_BIAS = 127
_GROUP = 32  # values per scale in mxfp4
_BLOCKS, _SCALES, _SCALE_INV = "_blocks", "_scales", "_scale_inv"


def check_quantization(quantization: Quantization | None, source: str) -> None:
    """Raise ConfigError if the quantization of a checkpoint (from its config.json) cannot be dequantized."""
    if quantization is None:
        return
    method = quantization.get("quant_method", "unknown")
    if method == "mxfp4" or (method == "fp8" and quantization.get("weight_block_size") is not None):
        return
    if method == compressed_tensors.METHOD:
        method = compressed_tensors.why_unreadable(quantization)
        if not method:
            return
    raise ConfigError(
        f"pretrained={source!r} is not supported because its quantization is {method}. Supported: mxfp4, block-scaled "
        "fp8, and compressed-tensors with symmetric int4, int8, fp8, mxfp4 or nvfp4 weights",
        code="not_supported",
        keys=("pretrained",),
        fix="model.pretrained=<a bf16 version of the checkpoint>",
    )


def dequantized(tensors: Mapping[str, StoredTensor], quantization: Quantization | None) -> dict[str, StoredTensor]:
    """Return the lazy tensors by hub key. Each quantized tensor and its scales become one plain lazy tensor."""
    if quantization is None:
        return dict(tensors)
    if quantization.get("quant_method") == compressed_tensors.METHOD:
        return compressed_tensors.plain(tensors, quantization)
    plain: dict[str, StoredTensor] = {}
    for key, tensor in tensors.items():
        if key.endswith(_BLOCKS) and (scales := key.removesuffix(_BLOCKS) + _SCALES) in tensors:
            plain[key.removesuffix(_BLOCKS)] = _MXFP4(tensor, tensors[scales])
        elif key + _SCALE_INV in tensors:
            plain[key] = _FP8(tensor, tensors[key + _SCALE_INV], quantization["weight_block_size"])
        elif not _is_scale(key, tensors):
            plain[key] = tensor
    return plain


def _is_scale(key: str, tensors: Mapping[str, StoredTensor]) -> bool:
    return (key.endswith(_SCALES) and key.removesuffix(_SCALES) + _BLOCKS in tensors) or (
        key.endswith(_SCALE_INV) and key.removesuffix(_SCALE_INV) in tensors
    )


class _MXFP4(LazyTensor):
    """Exact in bf16: values have at most four significant bits and a power-of-two scale."""

    dtype_name = "BF16"

    def __init__(self, blocks: StoredTensor, scales: StoredTensor):
        self._blocks, self._scales = blocks, scales
        experts, rows, groups, _ = blocks.get_shape()
        self.shape = [experts, groups * _GROUP, rows]

    def _read(self, ranges: list[tuple[int, int]]) -> Tensor:
        (e0, e1), (c0, c1), (r0, r1) = ranges
        g0, g1 = c0 // _GROUP, -(-c1 // _GROUP)
        blocks_ERGB = self._blocks[e0:e1, r0:r1, g0:g1]
        scales_ERG = self._scales[e0:e1, r0:r1, g0:g1]
        coded = compressed_tensors.unpack_e2m1(blocks_ERGB).bfloat16()
        values = torch.ldexp(coded, scales_ERG.int()[..., None] - _E8M0_BIAS)
        return values.flatten(-2)[..., c0 - g0 * _GROUP : c1 - g0 * _GROUP].transpose(1, 2).contiguous()


class _FP8(LazyTensor):
    """The dequantized weight in fp32, rounded once when it is stored. The part need not be aligned with blocks."""

    dtype_name = "F32"

    def __init__(self, weight: StoredTensor, scale: StoredTensor, block: list[int]):
        self._weight, self._scale, self._block = weight, scale, block
        self.shape = weight.get_shape()

    def _read(self, ranges: list[tuple[int, int]]) -> Tensor:
        (o0, o1), (i0, i1) = ranges
        scale = self._scale[self._blocks_of(0, o0, o1), self._blocks_of(1, i0, i1)].float()
        rows = torch.arange(o0, o1) // self._block[0] - o0 // self._block[0]
        columns = torch.arange(i0, i1) // self._block[1] - i0 // self._block[1]
        result: Tensor = self._weight[o0:o1, i0:i1].float() * scale[rows[:, None], columns]
        return result

    def _blocks_of(self, dim: int, start: int, stop: int) -> slice:
        return slice(start // self._block[dim], -(-stop // self._block[dim]))
