"""Accumulate weight gradients of experts directly into the float32 main gradient, with one GEMM per expert.

torch's grouped GEMM cannot accumulate: its result is written, then read and added. If experts have enough rows
(`gemm_timings.adds_faster`), one accumulating GEMM per expert (`linear.add_product_`) is faster. Token dispatch already
provides the number of rows on the host. A custom operator makes the GEMMs visible to a dry run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from automodel_cli.distributed.wgrad_fusion.linear import add_product_


@torch.library.custom_op("automodel::add_grouped_", mutates_args=("total_LIO",))
def add_grouped_(total_LIO: Tensor, left_NI: Tensor, right_NO: Tensor, count_L: list[int], first: bool) -> None:
    """Compute `total_LIO[l] += left_NI[rows of l].T @ right_NO[rows of l]`.

    Args:
        count_L: rows of each expert, which are consecutive.
        first: overwrite the sum.
    """
    # count_L [2, 0, 1]: rows 0-1 add to expert 0, row 2 to expert 2. Expert 1 gets zeros if the sum is new.
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
