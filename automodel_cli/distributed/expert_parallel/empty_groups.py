"""Gradients of experts that received no tokens, where a GPU's grouped products leave them unwritten.

The gradient of an expert's weight is a sum over its rows; without rows it is zero. torch's grouped product on compute
capability 10 (B200) returns what the memory held before (pytorch issue 172439, open in torch 2.14). Each kind of
product is tried once on the device with empty groups. Where it fails, gradients of empty groups are set to zero.

Shapes: L groups, N rows, I and O columns.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from automodel_cli.distributed.device_threads import threads_on_this_device

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(first_NI, second_NO, ends_L)` -> `[L, I, O]`: for each group the sum over its rows of first times second."""

logger = logging.getLogger(__name__)
_WIDTHS = (128, 256)
_BLOCKS = 16  # a product may take memory for itself before that of its result
_ENDS = (0, 32, 32, 48, 96, 96)
"""Of the groups of the test: the first, the third and the last are empty."""


def weight_gradient(first_NI: Tensor, second_NO: Tensor, ends_L: Tensor) -> Tensor:
    """The grouped product of torch, zero for empty groups on every device."""
    return with_zeros(_of_torch, first_NI, second_NO, ends_L)


def with_zeros(product: Product, first_NI: Tensor, second_NO: Tensor, ends_L: Tensor, name: str = "torch") -> Tensor:
    """What `product` returns, zero for empty groups. Products of one `name` and dtype are tried once."""
    grad_LIO = product(first_NI, second_NO, ends_L)
    if leaves_garbage(product, first_NI.device, first_NI.dtype, name):
        grad_LIO.masked_fill_(is_empty_L(ends_L)[:, None, None], 0)
    return grad_LIO


def is_empty_L(ends_L: Tensor) -> Tensor:
    """Which groups have no rows. Nothing is read on the host."""
    return ends_L.diff(prepend=ends_L.new_zeros(1)) == 0


def leaves_garbage(product: Product, device: torch.device, dtype: torch.dtype, name: str = "torch") -> bool:
    """Whether empty groups get something else than zeros on this device. Only GPUs are tried."""
    if device.type != "cuda":
        return False
    key = (device, dtype, name)
    if key not in _known:
        # A graph, a recomputation, hooks and modes of the caller are not there on a thread of its own.
        with threads_on_this_device(1) as thread:
            _known[key] = thread.submit(_tried, product, device, dtype).result()
        if _known[key]:
            logger.info("grouped products (%s) leave empty groups unwritten here: they are set to zero", name)
    return _known[key]


def torch_leaves_garbage(device: torch.device, dtype: torch.dtype) -> bool:
    """The same of torch's own grouped product."""
    return leaves_garbage(_of_torch, device, dtype)


_known: dict[tuple[torch.device, torch.dtype, str], bool] = {}


def _tried(product: Product, device: torch.device, dtype: torch.dtype) -> bool:
    ends_L = torch.tensor(_ENDS, dtype=torch.int32, device=device)
    first_NI, second_NO = (torch.ones(_ENDS[-1], width, dtype=dtype, device=device) for width in _WIDTHS)
    # The allocator hands freed memory on: what a kernel leaves unwritten is then not a number.
    used = [torch.full((len(_ENDS), *_WIDTHS), torch.nan, dtype=dtype, device=device) for _ in range(_BLOCKS)]
    del used
    return bool((product(first_NI, second_NO, ends_L)[is_empty_L(ends_L)] != 0).any())


def _of_torch(first_NI: Tensor, second_NO: Tensor, ends_L: Tensor) -> Tensor:
    return grouped_mm(first_NI.t(), second_NO, offs=ends_L)


def guarded(grouped: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A grouped product `(rows, weights, offs)` with a gradient, such that the weights' gradient is zero for empty
    groups."""

    @functools.wraps(grouped)
    def product(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        return grouped(input, _Weights.apply(weight, offs) if weight.requires_grad else weight, offs)

    return product


class _Weights(torch.autograd.Function):
    """The weights as they are; their gradient with zeros for empty groups."""

    @staticmethod
    def forward(ctx: Any, weight_LIO: Tensor, ends_L: Tensor) -> Tensor:
        ctx.save_for_backward(ends_L)
        return weight_LIO.view_as(weight_LIO)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (ends_L,) = ctx.saved_tensors
        return grads[0].masked_fill(is_empty_L(ends_L)[:, None, None], 0), None
