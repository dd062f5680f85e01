"""MXFP8: e4m3 values with one scale per 32 values of a row. Scales are powers of two, stored as exponents (e8m0).

The scale of a block is the smallest 2^e for which no value exceeds 448. The exponent is rounded up, as by NVIDIA's
`cvt.rp.satfinite.ue8m0` and torchao's RCEIL mode. The format is defined in "OCP Microscaling Formats", version 1.0.

Example: a block with maximum 1000 needs 2^e >= 1000 / 448 = 2.2, so e = 2. 1000 is stored as 250 and rounded to 256.

Tensor cores of compute capability 10 read exponents in tiles of 128 rows x 4 blocks (cuBLAS, "1D block scaling factors
layout"). Has not run on a GPU yet.

Shapes: T tokens, F features. M rows, K contracted, G = K / 32 blocks of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from automodel_cli.distributed.fusion.compiled_regions import FusibleRegion

BLOCK = 32
SCALE = torch.float8_e8m0fnu
CAPABILITY = (10, 0)
_MOST = 448.0
_MANTISSA, _BITS = 0x7FFFFF, 23
_ROWS, _COLUMNS = 128, 4  # Size of a tile.


def cast_mxfp8(x_TF: Tensor, transposed: bool, tiled: bool) -> tuple[Tensor, Tensor]:
    """Cast to e4m3 `[T, F]`, or `[F, T]` if `transposed`, contiguous, with e8m0 exponents.

    The exponents are `[M, G]`, or flat in the layout of tensor cores if `tiled`.
    """
    x_MK = x_TF.transpose(-2, -1) if transposed else x_TF
    x_MGB = x_MK.float().unflatten(-1, (-1, BLOCK))
    bits_MG = (x_MGB.abs().amax(-1) / _MOST).view(torch.int32)
    exponent, mantissa = bits_MG >> _BITS, bits_MG & _MANTISSA
    # Round up to the next power of two. Subnormal numbers have one more exponent, 2^-127. 255 is NaN.
    up = torch.where(exponent == 0, mantissa > 1 << (_BITS - 1), mantissa > 0)
    stored_MG = torch.where(exponent == 255, 254 + (mantissa > 0).int(), exponent + up)
    # A stored exponent e means 2^(e - 127). Its reciprocal 2^(127 - e) has the exponent bits 254 - e. The cases 0, 254
    # and 255 are set below.
    factor_MG = ((254 - stored_MG) << _BITS).view(torch.float32)
    for beyond, value in ((0, 1.0), (254, 2.0**-127), (255, float("nan"))):
        factor_MG = torch.where(stored_MG == beyond, value, factor_MG)
    values_MGB = (x_MGB * factor_MG[..., None]).clamp(-_MOST, _MOST).to(torch.float8_e4m3fn)
    scale_MG = stored_MG.to(torch.uint8)
    scale = _tiles(scale_MG) if tiled else scale_MG
    return values_MGB.flatten(-2).contiguous(), scale.contiguous().view(SCALE)


def dequantize_mxfp8(values_MK: Tensor, scale_MG: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of a cast without tiles."""
    values: Tensor = (values_MK.to(dtype).unflatten(-1, (-1, BLOCK)) * scale_MG.to(dtype)[..., None]).flatten(-2)
    return values


def mxfp8_gemm(a_MK: Tensor, scale_a: Tensor, b_NK: Tensor, scale_b: Tensor) -> Tensor:
    """Multiply two casts with tiles, bfloat16 `[M, N]`."""
    blocks, tiles = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    return scaled_mm(
        a_MK, b_NK.t(), scale_a, blocks, scale_b, blocks, swizzle_a=tiles, swizzle_b=tiles, output_dtype=torch.bfloat16
    )


def _tiles(scale_MG: Tensor) -> Tensor:
    """Return the exponents tile by tile, flat. In a tile, row 32 i + j is at 16 j + 4 i. Padded with zeros."""
    rows, columns = scale_MG.shape
    padded = torch.nn.functional.pad(scale_MG, (0, -columns % _COLUMNS, 0, -rows % _ROWS))
    # Dimensions: row of tiles, i, j, tile, 4.
    tiles = padded.unflatten(-1, (-1, _COLUMNS)).unflatten(0, (-1, 4, _ROWS // 4))
    flat: Tensor = tiles.permute(0, 3, 2, 1, 4).flatten()
    return flat


def _sample(rows: int) -> tuple[object, ...]:
    return torch.randn(rows, 2 * BLOCK, generator=torch.Generator().manual_seed(rows)), False, True


FUSED_OPS = FusibleRegion("fp8 cast mxfp8", cast_mxfp8, None, _sample)
