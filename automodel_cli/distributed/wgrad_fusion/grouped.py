"""Gradients of experts' weights, added to the float32 sum over microbatches in the products that make them.

torch's grouped product cannot add to what it writes, which is then read and added. Where an expert has work enough for
a product of its own (`product_speed.adds_faster`), one product for each expert that adds (`added.add_product_`) is
sooner done; how many rows each has is known to the host since the dispatch. An operator of its own, so that a dry run
sees which products it stands for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from automodel_cli.distributed.wgrad_fusion.linear import add_product_


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
