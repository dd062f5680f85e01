"""Triton kernels of `permute`. Imports triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _pairs(
    expert, order, token, place, count, num_pairs, num_experts, choices, halvings: tl.constexpr, block: tl.constexpr
):
    at = tl.program_id(0) * block + tl.arange(0, block)
    pair = tl.load(order + at, mask=at < num_pairs, other=0)
    tl.store(token + at, pair // choices, mask=at < num_pairs)
    tl.store(place + pair, at.to(tl.int64), mask=at < num_pairs)
    # Binary search for the first pair of this expert (`first`) and the first pair of the next one (`end`).
    # Program lanes are pairs above and experts here. Lane `at` counts expert `at`: two binary searches in the sorted
    # ids.
    first, last = tl.zeros([block], tl.int32), tl.zeros([block], tl.int32) + num_pairs
    end, over = first, last
    for _ in range(halvings):
        middle = (first + last) // 2
        below = tl.load(expert + middle, mask=(first < last) & (at < num_experts), other=0) < at
        first, last = tl.where(below & (first < last), middle + 1, first), tl.where(below, last, middle)
        middle = (end + over) // 2
        below = tl.load(expert + middle, mask=(end < over) & (at < num_experts), other=0) <= at
        end, over = tl.where(below & (end < over), middle + 1, end), tl.where(below, over, middle)
    tl.store(count + at, (end - first).to(tl.int64), mask=at < num_experts)


@triton.jit
def _arrivals(
    received, order, place, expert, ends, num_local, groups: tl.constexpr, padded: tl.constexpr, block: tl.constexpr
):
    # One program per (source rank, local expert). It copies one contiguous run of rows.
    group = tl.program_id(0)
    its_rank, its_expert = group // num_local, group % num_local
    other = tl.arange(0, padded)
    rank_of, expert_of = other // num_local, other % num_local
    rows = tl.load(received + other, mask=other < groups, other=0)
    # received [[1, 1], [2, 1]] and program 2 (rank 1, expert 0): here = 2 rows. They arrived after 1 + 1 = 2 rows, and
    # are sorted behind the 1 row of rank 0 for expert 0.
    here = tl.sum(tl.where(other == group, rows, 0), 0)
    arrived = tl.sum(tl.where(other < group, rows, 0), 0)
    is_before = (expert_of < its_expert) | ((expert_of == its_expert) & (rank_of < its_rank))
    sorted_first = tl.sum(tl.where(is_before, rows, 0), 0)
    # Only the programs of the last rank write: after their rows, all rows of the expert are counted.
    tl.store(ends + its_expert, (sorted_first + here).to(tl.int32), mask=group >= groups - num_local)
    for start in range(0, here, block):
        at = start + tl.arange(0, block)
        tl.store(order + sorted_first + at, arrived + at, mask=at < here)
        tl.store(place + arrived + at, sorted_first + at, mask=at < here)
        # `at * 0` turns the scalar expert into a vector of the block's shape.
        tl.store(expert + sorted_first + at, (at * 0 + its_expert).to(tl.int64), mask=at < here)


def pairs(expert_P: Tensor, order_P: Tensor, choices: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `permute.permute_pairs` on CUDA."""
    token_P, place_P = torch.empty_like(order_P), torch.empty_like(order_P)
    count_E = order_P.new_empty(num_experts)
    programs = triton.cdiv(max(len(order_P), num_experts), _BLOCK)
    _pairs[(programs,)](
        expert_P, order_P, token_P, place_P, count_E, len(order_P), num_experts, choices,
        len(order_P).bit_length(), _BLOCK,
    )  # fmt: skip
    return token_P, place_P, count_E


def arrivals(received_RL: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute `permute.permute_arrivals` on CUDA."""
    order_N, place_N, expert_N = (received_RL.new_empty(num_rows) for _ in range(3))
    groups, num_local = received_RL.numel(), received_RL.shape[1]
    ends_L = torch.empty(num_local, dtype=torch.int32, device=received_RL.device)
    _arrivals[(groups,)](
        received_RL, order_N, place_N, expert_N, ends_L, num_local, groups, triton.next_power_of_2(groups), _BLOCK
    )
    return order_N, place_N, expert_N, ends_L
