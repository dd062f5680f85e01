"""Compare attention kernels with the reference on small inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from automodel_cli.models.attention import cudnn, dense, kernels

_LENGTHS = (48, 80)
_LENGTHS_CUDNN = (200, 312, 64)  # documents of at most 128 tokens alone are not computed by all versions
_SCALE = 0.125
_Attention = Callable[[Tensor, Tensor, Tensor, kernels.VarlenPlan], Tensor]
"""Causal attention on flat tokens."""


def kernel_error(device: torch.device, widths: tuple[int, int] = (64, 64)) -> float:
    """Return the largest relative error of the active kernel against the fp32 definition, forward and backward.

    Measured on two documents with grouped heads, with and without a window. `widths` of keys and values are not padded.
    """

    def attend(window: int | None) -> _Attention:
        return lambda q, k, v, plan: kernels.varlen_cuda(q, k, v, plan, None, _SCALE, window, pads=False)

    return max(_disagreement(device, attend(window), window, _LENGTHS, *widths) for window in (None, 16))


def cudnn_error(device: torch.device, lengths: Sequence[int] = _LENGTHS_CUDNN, width: int = 64) -> float:
    """Return the same of cuDNN's attention, which has no windows."""

    def attend(q: Tensor, k: Tensor, v: Tensor, plan: kernels.VarlenPlan) -> Tensor:
        return cudnn.varlen_cudnn(q, k, v, plan, _SCALE)

    return _disagreement(device, attend, None, lengths, width, width)


def _disagreement(
    device: torch.device,
    attend: _Attention,
    window: int | None,
    lengths: Sequence[int],
    width: int,
    value_width: int,
) -> float:
    scale, tokens = _SCALE, sum(lengths)
    generator = torch.Generator().manual_seed(0)
    shapes = ((tokens, 4, width), (tokens, 2, width), (tokens, 2, value_width))
    flat = [torch.randn(shape, generator=generator).to(device, torch.bfloat16).requires_grad_() for shape in shapes]
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
    plan = kernels.VarlenPlan(bounds, bounds, max(lengths), max(lengths), None)
    query, key, value = flat
    got = attend(query, key, value, plan)
    rows = [x.detach().float().requires_grad_() for x in flat]
    parts = []
    for piece in zip(*(x.split(lengths) for x in rows), strict=True):
        q, k, v = (kernels.per_query_head(x.transpose(0, 1)[None], 4) for x in piece)
        mask = dense.visible_mask(q.shape[2], (q.shape[2],), (0,), window, q.dtype, device)
        parts.append(dense.dense(q, k, v, mask, scale=scale)[0].transpose(0, 1))
    want = torch.cat(parts)
    grads = torch.autograd.grad(got.float().square().sum(), flat)
    requested = torch.autograd.grad(want.square().sum(), rows)
    pairs = [(got.detach(), want.detach()), *zip(grads, requested, strict=True)]
    return max(float((a.float() - b).norm() / b.norm()) for a, b in pairs)
