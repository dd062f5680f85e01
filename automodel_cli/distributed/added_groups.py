"""Gradients of experts' weights, added to the float32 sum over microbatches in the products that make them.

torch's grouped product cannot add to what it writes. Where an expert has work enough for a product of its own, one
product for each expert that adds (`added.add_product_`) takes no longer than the grouped one, and saves 10 bytes of
traffic a parameter; how many rows each has is known to the host since the dispatch. An operator of its own, so that a
dry run counts it as the grouped product that it stands for, with a launch for each expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from automodel_cli.distributed.added import add_product_

WORTH_FLOPS = 30e9
"""Of one expert's product, on average. On an H100 cuBLAS reaches 515 TFLOP/s on squares of 2048 (17e9), where little
is won, and 614 on 2048 x 4096 x 4096 (69e9; triton issue 2339), what grouped products are measured to do."""


def is_worth_it(rows: int, num_experts: int, weights: int) -> bool:
    """With so many rows for all experts, of which each has so many weights."""
    return 2.0 * rows / num_experts * weights >= WORTH_FLOPS


@torch.library.custom_op("automodel::add_grouped_", mutates_args=("total_LIO",))
def add_grouped_(total_LIO: Tensor, left_NI: Tensor, right_NO: Tensor, count_L: list[int], first: bool) -> None:
    """`total_LIO[l] += left_NI[rows of l].T @ right_NO[rows of l]`: the first `count_L[0]` rows are of expert 0, and so
    on. With `first` the sum is overwritten."""
    begin = 0
    for total_IO, count in zip(total_LIO, count_L, strict=True):
        rows = slice(begin, begin + count)
        begin += count
        if count:
            add_product_(total_IO, left_NI[rows].t(), right_NO[rows], first=first)
        elif first:
            total_IO.zero_()


@add_grouped_.register_fake
def _(total_LIO: Tensor, left_NI: Tensor, right_NO: Tensor, count_L: list[int], first: bool) -> None:
    return None
