"""Zero weight gradients of experts without tokens, on GPUs whose grouped GEMM leaves them unwritten.

The weight gradient of an expert is a sum over its rows, so it is zero without rows. On compute capability 10 (B200),
torch's grouped GEMM returns uninitialized memory instead (pytorch issue 172439, open in torch 2.14). Each kind of GEMM
is tested once per device with empty groups. If the test fails, gradients of empty groups are set to zero.

Shapes: L groups (experts), N rows, I and O columns.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from automodel_cli.distributed.device_threads import threads_on_this_device
from automodel_cli.distributed.typed_torch import Ctx, Function

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`(first_NI, second_NO, ends_L)` -> `[L, I, O]`: first^T second of the rows of each group."""

logger = logging.getLogger(__name__)
_WIDTHS = (128, 256)
_BLOCKS = 16  # A GEMM may allocate workspace before its result.
_ENDS = (0, 32, 32, 48, 96, 96)
"""Ends of the groups in the test. Groups 0, 2 and 5 are empty."""


def weight_gradient(first_NI: Tensor, second_NO: Tensor, ends_L: Tensor) -> Tensor:
    """Return torch's grouped weight gradient `[L, I, O]`, with zeros for empty groups on every device."""
    return with_zeros(_of_torch, first_NI, second_NO, ends_L)


def with_zeros(product: Product, first_NI: Tensor, second_NO: Tensor, ends_L: Tensor, name: str = "torch") -> Tensor:
    """Call `product` and set the result of empty groups to zero if needed.

    The device is tested once for each `name` and dtype.
    """
    grad_LIO = product(first_NI, second_NO, ends_L)
    if leaves_garbage(product, first_NI.device, first_NI.dtype, name):
        grad_LIO.masked_fill_(is_empty_L(ends_L)[:, None, None], 0)
    return grad_LIO


def is_empty_L(ends_L: Tensor) -> Tensor:
    """Return which groups have no rows, bool `[L]`. Does not synchronize with the host."""
    return ends_L.diff(prepend=ends_L.new_zeros(1)) == 0


def leaves_garbage(product: Product, device: torch.device, dtype: torch.dtype, name: str = "torch") -> bool:
    """Return whether `product` leaves empty groups unwritten on this device. Only CUDA devices are tested."""
    if device.type != "cuda":
        return False
    key = (device, dtype, name)
    if key not in _results:
        # Run in another thread, which has no graph capture, recomputation, hooks or modes of the caller.
        with threads_on_this_device(1) as thread:
            _results[key] = thread.submit(_tried, product, device, dtype).result()
        if _results[key]:
            logger.info("grouped GEMM %s leaves empty groups unwritten on this device. They are set to zero", name)
    return _results[key]


def torch_leaves_garbage(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's own grouped GEMM leaves empty groups unwritten."""
    return leaves_garbage(_of_torch, device, dtype)


_results: dict[tuple[torch.device, torch.dtype, str], bool] = {}


def _tried(product: Product, device: torch.device, dtype: torch.dtype) -> bool:
    ends_L = torch.tensor(_ENDS, dtype=torch.int32, device=device)
    first_NI, second_NO = (torch.ones(_ENDS[-1], width, dtype=dtype, device=device) for width in _WIDTHS)
    # The allocator reuses this freed memory, so unwritten results are NaN.
    used = [torch.full((len(_ENDS), *_WIDTHS), torch.nan, dtype=dtype, device=device) for _ in range(_BLOCKS)]
    del used
    return bool((product(first_NI, second_NO, ends_L)[is_empty_L(ends_L)] != 0).any())


def _of_torch(first_NI: Tensor, second_NO: Tensor, ends_L: Tensor) -> Tensor:
    return grouped_mm(first_NI.t(), second_NO, offs=ends_L)


def guarded(grouped: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a differentiable grouped GEMM `(rows, weights, offs)` so that weight gradients of empty groups are zero."""

    @functools.wraps(grouped)
    def product(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        return grouped(input, _Weights.apply(weight, offs) if weight.requires_grad else weight, offs)

    return product


class _Weights(Function):
    """Identity of the weights. The backward sets the gradient of empty groups to zero."""

    @staticmethod
    def forward(ctx: Ctx, weight_LIO: Tensor, ends_L: Tensor) -> Tensor:
        ctx.save_for_backward(ends_L)
        return weight_LIO.view_as(weight_LIO)

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> tuple[Tensor, None]:
        (ends_L,) = ctx.saved_tensors
        return grads[0].masked_fill(is_empty_L(ends_L)[:, None, None], 0), None
