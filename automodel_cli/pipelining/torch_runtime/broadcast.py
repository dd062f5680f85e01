"""Broadcast tensors whose number, shapes and dtypes only the source rank has."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def broadcast_tensors(
    tensors: list[Tensor] | None, source: int, group: dist.ProcessGroup, device: torch.device
) -> list[Tensor]:
    """Return the tensors of the source on every rank of the group. Collective.

    Shapes and dtypes are sent first, as Python objects, then the values.

    Args:
        tensors: the tensors on the source rank, None on the others.
        source: global rank of the source.
        device: device of the received tensors.
    """
    described: list[Any] = [[(tuple(tensor.shape), tensor.dtype) for tensor in tensors or ()]]
    dist.broadcast_object_list(described, src=source, group=group, device=device)
    if tensors is None:
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in described[0]]
    for tensor in tensors:
        dist.broadcast(tensor, src=source, group=group)
    return tensors
