"""MXFP8: e4m3 numbers of which 32 in a row share a scale, a power of two kept as its exponent in 8 bits (e8m0).

The scale of a block is the smallest 2^e with which none of it exceeds 448 (round-up of the exponent, as NVIDIA's
`cvt.rp.satfinite.ue8m0` and torchao's RCEIL mode; "OCP Microscaling Formats", version 1.0, has the format). Tensor
cores of compute capability 10 want the exponents in tiles of 128 rows and 4 blocks (cuBLAS, "1D block scaling factors
layout"). Never run on a GPU.

Shapes: T tokens, F features; M rows, K contracted, G = K / 32 blocks of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from automodel_cli.distributed.fusion.compiled_regions import FusibleRegion

BLOCK = 32
SCALE = torch.float8_e8m0fnu
CAPABILITY = (10, 0)
_MOST = 448.0
_MANTISSA, _BITS = 0x7FFFFF, 23
_ROWS, _COLUMNS = 128, 4  # of a tile


def cast_mxfp8(x_TF: Tensor, turned: bool, tiled: bool) -> tuple[Tensor, Tensor]:
    """e4m3 [F, T] where it is `turned`, else [T, F], contiguous, with e8m0 exponents: a row of them for each row, or
    `tiled`, flat."""
    x_MK = x_TF.transpose(-2, -1) if turned else x_TF
    x_MGB = x_MK.float().unflatten(-1, (-1, BLOCK))
    bits_MG = (x_MGB.abs().amax(-1) / _MOST).view(torch.int32)
    exponent, mantissa = bits_MG >> _BITS, bits_MG & _MANTISSA
    # The exponent of the next power of two. Below normal numbers there is one more, 2^-127; not a number is 255.
    up = torch.where(exponent == 0, mantissa > 1 << (_BITS - 1), mantissa > 0)
    stored_MG = torch.where(exponent == 255, 254 + (mantissa > 0).int(), exponent + up)
    factor_MG = ((254 - stored_MG) << _BITS).view(torch.float32)
    for beyond, value in ((0, 1.0), (254, 2.0**-127), (255, float("nan"))):
        factor_MG = torch.where(stored_MG == beyond, value, factor_MG)
    values_MGB = (x_MGB * factor_MG[..., None]).clamp(-_MOST, _MOST).to(torch.float8_e4m3fn)
    scale_MG = stored_MG.to(torch.uint8)
    scale = _tiles(scale_MG) if tiled else scale_MG
    return values_MGB.flatten(-2).contiguous(), scale.contiguous().view(SCALE)


def dequantize_mxfp8(values_MK: Tensor, scale_MG: Tensor, dtype: torch.dtype) -> Tensor:
    """What a cast without tiles stands for."""
    return (values_MK.to(dtype).unflatten(-1, (-1, BLOCK)) * scale_MG.to(dtype)[..., None]).flatten(-2)


def mxfp8_gemm(a_MK: Tensor, scale_a: Tensor, b_NK: Tensor, scale_b: Tensor) -> Tensor:
    """bfloat16 [M, N], of casts with tiles."""
    blocks, tiles = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    return scaled_mm(
        a_MK, b_NK.t(), scale_a, blocks, scale_b, blocks, swizzle_a=tiles, swizzle_b=tiles, output_dtype=torch.bfloat16
    )


def _tiles(scale_MG: Tensor) -> Tensor:
    """Flat: tiles by row, in each the exponents of row 32 i + j at 16 j + 4 i; zeros fill the last ones."""
    rows, columns = scale_MG.shape
    padded = torch.nn.functional.pad(scale_MG, (0, -columns % _COLUMNS, 0, -rows % _ROWS))
    tiles = padded.unflatten(-1, (-1, _COLUMNS)).unflatten(0, (-1, 4, _ROWS // 4))  # rows of tiles, i, j, tiles, 4
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def _sample(rows: int) -> tuple[Any, ...]:
    return torch.randn(rows, 2 * BLOCK, generator=torch.Generator().manual_seed(rows)), False, True


FUSED_OPS = FusibleRegion("fp8 cast mxfp8", cast_mxfp8, None, _sample)
