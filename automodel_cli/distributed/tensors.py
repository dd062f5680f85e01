"""Local shards, and the tensors in nested values."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves


def to_local(tensor: Tensor) -> Tensor:
    """Return the shard of this rank, inside autograd. A plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def tensors_in(value: object) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def device_of(modules: Iterable[nn.Module]) -> torch.device:
    """Return the device of modules with tensors. A pipeline stage may have buffers only (rotary tables)."""
    return next(tensor.device for part in modules for tensor in itertools.chain(part.parameters(), part.buffers()))
