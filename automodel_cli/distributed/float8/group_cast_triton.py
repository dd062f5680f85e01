"""Triton kernel of `group_cast`. Imports triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _WIDTH = 64, 64


@triton.jit
def _cast_groups(
    x, ends, values, inverse, padded_ends, num_features, num_places, num_groups,
    padded: tl.constexpr, rows: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    group, block = tl.program_id(1), tl.program_id(0)
    other = tl.arange(0, padded)
    end_of = tl.load(ends + other, mask=other < num_groups, other=0)
    start_of = tl.load(ends + other - 1, mask=(other > 0) & (other < num_groups), other=0)
    room_of = tl.where(other < num_groups, (end_of - start_of + 15) // 16 * 16, 0)
    first = tl.sum(tl.where(other < group, room_of, 0), 0)
    room = tl.sum(tl.where(other == group, room_of, 0), 0)
    start = tl.sum(tl.where(other == group, start_of, 0), 0)
    count = tl.sum(tl.where(other == group, end_of - start_of, 0), 0)
    tl.store(padded_ends + group, (first + room).to(tl.int32), mask=block == 0)
    feature = block * width + tl.arange(0, width)
    row = tl.arange(0, rows)
    largest = tl.zeros([width], tl.float32)
    for at in range(0, count, rows):
        here = ((at + row) < count)[:, None] & (feature < num_features)[None, :]
        place = (start + at + row).to(tl.int64)[:, None] * num_features + feature[None, :]
        tile = tl.load(x + place, mask=here, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(tile), 0))
    # As `quantization.scale_of`: divide in float64 and keep the exponent. The reciprocal has the negated exponent.
    scale = (448.0 / tl.maximum(largest, 1e-12).to(tl.float64)).to(tl.float32)
    bits = scale.to(tl.int32, bitcast=True) & -0x800000
    scale = bits.to(tl.float32, bitcast=True)
    back = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    tl.store(inverse + group.to(tl.int64) * num_features + feature, back, mask=feature < num_features)
    for at in range(0, room, rows):
        here = ((at + row) < count)[:, None] & (feature < num_features)[None, :]
        place = (start + at + row).to(tl.int64)[:, None] * num_features + feature[None, :]
        tile = tl.load(x + place, mask=here, other=0.0).to(tl.float32) * scale[None, :]
        tile = tl.minimum(tl.maximum(tile, -448.0), 448.0).to(values.dtype.element_ty)
        there = feature.to(tl.int64)[None, :] * num_places + (first + at + row)[:, None]
        tl.store(values + there, tile, mask=((at + row) < room)[:, None] & (feature < num_features)[None, :])


def cast(
    x_NF: Tensor, ends_L: Tensor, num_places: int, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `group_cast.cast_groups` on CUDA. Rows after the last expert are not written.

    `dtype` float32 leaves the rounding to the caller, because Triton's interpreter does not round to nearest.
    """
    num_features, num_groups = x_NF.shape[1], len(ends_L)
    values_FP = torch.empty(num_features, num_places, dtype=dtype, device=x_NF.device)
    inverse_LF = torch.empty(num_groups, num_features, dtype=torch.float32, device=x_NF.device)
    padded_ends_L = torch.empty_like(ends_L)
    _cast_groups[(triton.cdiv(num_features, _WIDTH), num_groups)](
        x_NF, ends_L, values_FP, inverse_LF, padded_ends_L, num_features, num_places, num_groups,
        triton.next_power_of_2(num_groups), _ROWS, _WIDTH,
    )  # fmt: skip
    return values_FP, inverse_LF, padded_ends_L
