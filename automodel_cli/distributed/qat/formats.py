"""Number formats of fake quantization, and their arithmetic.

A value x of a group with the scale s is stored as a code q = round(x / s) on the grid of the format, and read as q s.
Scales come from the largest absolute value `amax` of a group, which is part of a row:

- int4, int8: s = amax / ((2^b - 1) / 2), codes from -2^(b-1) to 2^(b-1) - 1, as torchao and llm-compressor do.
- fp8 (e4m3): s = amax / 448.
- mxfp4: s = 2^ceil(log2(amax / 6)) for 32 values, codes in e2m1 (OCP Microscaling 1.0, scale rounded up as in torchao).
- nvfp4: s = e4m3(g amax / 6) / g for 16 values, with g = 2688 / (largest absolute value of the tensor), codes in e2m1.

Scales of int and fp8 weights are rounded to bfloat16 before they divide, so that a file in bfloat16 stores them
exactly. Rounding is to the nearest code, ties to even.

Shapes: O outputs, I inputs, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Example: a group (1.5, -0.75, 0.3, 0.1), so amax = 1.5.
#     int4    s = 1.5 / 7.5 = 0.2      codes 7 -4 1 0      values 1.40 -0.80 0.20 0.00
#     int8    s = 1.5 / 127.5          codes 127 -64 25 8  values 1.496 -0.754 0.294 0.094
#     mxfp4   s = 2^ceil(log2(0.25))   codes 6 -3 1 0.5    values 1.50 -0.75 0.25 0.125
FP8_MAX, E2M1_MAX = 448.0, 6.0
_TINY = torch.finfo(torch.float32).smallest_normal
_SMALLEST_E4M3 = 2.0**-9


@dataclass(frozen=True)
class Format:
    """A format of codes.

    name: int4, int8, fp8, mxfp4 or nvfp4.
    group_size: values of a row that share a scale. None: the row.
    """

    name: str
    group_size: int | None = None

    @property
    def bits(self) -> int:
        return 8 if self.name in ("int8", "fp8") else 4

    @property
    def is_integer(self) -> bool:
        return self.name.startswith("int")


class Scales(NamedTuple):
    """Scales `[O, G]` in fp32, and the factor g `[1]` of nvfp4, of which `of_groups` is already divided."""

    of_groups: Tensor
    of_tensor: Tensor | None = None


def weight_scales(
    weight_OI: Tensor,
    form: Format,
    tensor_amax: Tensor | None = None,
    over_shards: Callable[[Tensor], Tensor] | None = None,
) -> Scales:
    """Return the scales of a weight.

    Args:
        tensor_amax: largest absolute value of the tensor, and of all that share its factor g. nvfp4 only.
        over_shards: returns the maximum over all shards of a row, if a scale belongs to a row that is sharded.
    """
    # [O, I] -> [O, G, group] -> [O, G].
    amax_OG = _grouped(weight_OI.float(), form).abs().amax(-1)
    if over_shards is not None:
        amax_OG = over_shards(amax_OG)
    if form.name == "mxfp4":
        return Scales(_power_of_two_above(amax_OG / E2M1_MAX))
    if form.name == "nvfp4":
        assert tensor_amax is not None, "nvfp4 has a scale of the tensor"
        # g brings the largest group scale to 448, the end of e4m3: scales use its full range, whatever the weights'
        # magnitude.
        factor_1 = (FP8_MAX * E2M1_MAX / tensor_amax.float().clamp(min=_TINY)).clamp(max=1 / _TINY).reshape(1)
        coded_OG = (factor_1 * (amax_OG / E2M1_MAX)).clamp(max=FP8_MAX).to(torch.float8_e4m3fn).float()
        return Scales(coded_OG.clamp(min=_SMALLEST_E4M3) / factor_1, factor_1)
    # amax 1.1 in int4: 1.1 / 7.5 is rounded down to 0.1465, so 1.1 / s = 7.51 rounds to 8, which is clamped to 7.
    return Scales((amax_OG / _largest(form)).bfloat16().float().clamp(min=_TINY))


def token_scales(x: Tensor, form: Format, over_shards: Callable[[Tensor], Tensor] | None = None) -> Scales:
    """Return one scale for each token, `[..., 1]`."""
    amax = x.float().abs().amax(-1, keepdim=True)
    amax = amax if over_shards is None else over_shards(amax)
    return Scales((amax / _largest(form)).clamp(min=_TINY))


def codes(x: Tensor, form: Format, scales: Scales) -> Tensor:
    """Return the codes as fp32 values on the grid, in the shape of `x`."""
    return _clamped(_scaled(x, form, scales), form).view(x.shape)


def dequantized(coded: Tensor, form: Format, scales: Scales, dtype: torch.dtype) -> Tensor:
    """Return the values of codes. 4-bit floats are read in bfloat16, as their readers do."""
    values = (_grouped(coded, form) * scales.of_groups[..., None]).view(coded.shape)
    return values.bfloat16().to(dtype) if form.name in ("mxfp4", "nvfp4") else values.to(dtype)


def fake_quantized(x: Tensor, form: Format, scales: Scales, dtype: torch.dtype) -> Tensor:
    """Return `x` as a quantized file would have it."""
    return dequantized(codes(x, form, scales), form, scales, dtype)


def masked(gradient: Tensor, x: Tensor, form: Format, scales: Scales) -> Tensor:
    """Return the straight-through gradient: that of the value, or 0 where an integer code is clamped, as in torchao."""
    if not form.is_integer:
        return gradient
    rounded = _scaled(x, form, scales).round_()
    half = 2.0 ** (form.bits - 1)
    return gradient * ((rounded >= -half) & (rounded < half)).view(x.shape)


def _grouped(x: Tensor, form: Format) -> Tensor:
    grouped: Tensor = x.unflatten(-1, (-1, form.group_size or x.shape[-1]))
    return grouped


def _scaled(x: Tensor, form: Format, scales: Scales) -> Tensor:
    return _grouped(x.float(), form) / scales.of_groups[..., None]


def _largest(form: Format) -> float:
    return (2**form.bits - 1) / 2 if form.is_integer else FP8_MAX


def _clamped(scaled: Tensor, form: Format) -> Tensor:
    if form.is_integer:
        half = 2.0 ** (form.bits - 1)
        return scaled.round().clamp(-half, half - 1)
    if form.name == "fp8":
        return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
    size = scaled.abs().clamp(max=E2M1_MAX)
    # e2m1 has the values 0 0.5 1 1.5 2 3 4 6: steps of 0.5 up to 2, 1 up to 4, 2 up to 6. 2.4 becomes 2, 2.6 becomes 3,
    # 5.1 becomes 6.
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign((size / step).round() * step, scaled)


def _power_of_two_above(x: Tensor) -> Tensor:
    """Return the smallest power of two that is at least x, by its bits."""
    bits = x.view(torch.int32)
    # A float32 is 2^(exponent - 127) * 1.mantissa. A mantissa that is not 0 rounds up: 0.25 stays, 0.26 becomes 0.5.
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) > 0)
    return (exponent.clamp(1, 254) << 23).view(torch.float32)
