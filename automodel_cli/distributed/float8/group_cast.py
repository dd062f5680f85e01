"""Cast the tokens of several experts to float8 with one scale per expert and feature.

On CUDA, a Triton kernel (`group_cast_triton`) computes it. It has not run on a GPU yet. On first use it is compared
with the definition. If it differs, it is disabled with a warning.

Shapes: N rows of F features, sorted by L experts. P rows after padding the rows of each expert to a multiple of 16.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from automodel_cli.distributed import kernel_verification
from automodel_cli.distributed.float8.quantization import E4M3, MULTIPLE, scale_of


@torch.library.custom_op("automodel::fp8_cast_groups", mutates_args=())
def cast_groups(x_NF: Tensor, ends_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast and transpose the rows of each expert, with zero padding.

    Example: 2 experts with 3 and 17 rows have `ends_L` = [3, 20]. The result has their rows at 0-2 and 16-32, and
    padded ends [16, 48].

    Args:
        ends_L: end of the rows of each expert, int32.

    Returns e4m3 `[F, P]`, contiguous; the inverse scales, powers of two, float32 `[L, F]`; and the end of each expert
    after padding, int32 `[L]`. P is an upper bound, which avoids a host synchronization.
    """
    if has_cast_kernel(x_NF.device.type):
        from automodel_cli.distributed.float8 import group_cast_triton

        return group_cast_triton.cast(x_NF.contiguous(), ends_L, num_places(len(x_NF), len(ends_L)))
    return _cast(x_NF, ends_L)


@cast_groups.register_fake
def _(x_NF: Tensor, ends_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    places = num_places(len(x_NF), len(ends_L))
    values_FP = x_NF.new_empty(x_NF.shape[1], places, dtype=E4M3)
    return values_FP, x_NF.new_empty(len(ends_L), x_NF.shape[1], dtype=torch.float32), torch.empty_like(ends_L)


def num_places(num_rows: int, num_experts: int) -> int:
    """Return the smallest multiple of 16 that fits the padded rows of all experts, whatever their sizes."""
    # Each expert needs at most 15 rows of padding. 20 rows of 2 experts: 50, rounded up to 64.
    return -(-(num_rows + num_experts * (MULTIPLE - 1)) // MULTIPLE) * MULTIPLE


def _cast(x_NF: Tensor, ends_L: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    (num_rows, num_features), num_experts, device = x_NF.shape, len(ends_L), x_NF.device
    # ends [3, 20]: counts [3, 17], padded counts [16, 32], padded ends [16, 48]. shift = padded start - start = [0, 16
    # - 3]: row 3 moves to place 16.
    count_L = ends_L.diff(prepend=ends_L.new_zeros(1))
    padded_count_L = (count_L + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    padded_ends_L = padded_count_L.cumsum(0, dtype=torch.int32)
    expert_N = torch.arange(num_experts, device=device).repeat_interleave(count_L, output_size=num_rows)
    shift_L = (padded_ends_L - padded_count_L) - (ends_L - count_L)
    place_N = torch.arange(num_rows, device=device) + shift_L[expert_N]
    largest_LF = x_NF.new_zeros(num_experts, num_features)
    largest_LF.scatter_reduce_(0, expert_N[:, None].expand_as(x_NF), x_NF.abs(), "amax")
    scale_LF = scale_of(largest_LF, E4M3, power_of_two=True)
    most = torch.finfo(E4M3).max
    rows_NF = (x_NF.float() * scale_LF[expert_N]).clamp(-most, most)
    # (N, F) -> (P, F) with zeros between the experts -> (F, P).
    rows_PF = rows_NF.new_zeros(num_places(num_rows, num_experts), num_features).index_copy_(0, place_N, rows_NF)
    return rows_PF.t().to(E4M3).contiguous(), scale_LF.reciprocal(), padded_ends_L


@functools.cache
def has_cast_kernel(device_type: str) -> bool:
    return kernel_verification.trusted(
        device_type,
        "float8 cast of expert tokens",
        lambda device: group_cast_difference(device),
    )


@torch.no_grad()
def group_cast_difference(device: torch.device) -> str:
    """Return how the kernel differs from the definition, also with empty experts. Empty if they are equal."""
    from automodel_cli.distributed.float8 import group_cast_triton

    for counts, features in (([0, 5, 40, 0, 16], 48), ([300, 1], 80), ([0, 0, 7], 16)):
        ends_L = torch.tensor(counts).cumsum(0).to(device, torch.int32)
        x_NF = torch.randn(sum(counts), features, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
        # Columns from 1e-6 to 1e3, so that a scale of the wrong column is noticed.
        x_NF *= torch.logspace(-6, 3, features, device=device).bfloat16()
        stored = E4M3 if device.type == "cuda" else torch.float32
        actual = group_cast_triton.cast(x_NF, ends_L, num_places(len(x_NF), len(counts)), stored)
        reference, used = _cast(x_NF, ends_L), sum(-(-count // MULTIPLE) * MULTIPLE for count in counts)
        values, expected = (of[0][:, :used].to(E4M3).view(torch.uint8) for of in (actual, reference))
        if not (torch.equal(values, expected) and all(map(torch.equal, actual[1:], reference[1:]))):
            return "it differs from the definition"
    return ""
