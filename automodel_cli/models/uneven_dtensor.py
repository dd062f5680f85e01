"""DTensors with uneven chunks.

Megatron-FSDP splits one flat buffer of several parameters into equal pieces, so parameters are split at arbitrary rows
and a rank may hold none of them. torch's shard arithmetic (`full_tensor`, the library's sharded reader) assumes equal
chunks and would be wrong without an error. An uneven tensor reports its chunk with the method that torch's distributed
checkpoints use. This module contains everything else that depends on it.

Example: two parameters of 3 and 1 rows of equal width on 2 ranks. Rank 0 holds rows 0 and 1 of the first parameter and
nothing of the second. Rank 1 holds row 2 of the first parameter and the second parameter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_CHUNKS, _WRITES = "__create_chunk_list__", "__create_write_items__"  # torch's names: torch.distributed.checkpoint


def is_uneven(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return whether a tensor reports its own chunk. (Looked up by name: importing DTensor takes 0.7 s, and this must
    be free for models without any.)"""
    return hasattr(tensor, "to_local") and hasattr(cast("DTensor", tensor)._local_tensor, _CHUNKS)


def chunk(tensor: DTensor) -> tuple[slice, ...]:
    """Return the offset of this rank's part in the full tensor."""
    (only,) = tensor.__create_chunk_list__()
    return tuple(slice(start, start + size) for start, size in zip(only.offsets, only.sizes, strict=True))


def cut_like(value: Tensor, param: DTensor) -> None:
    """Make `value`, a DTensor laid out like the uneven `param`, state the same chunk."""
    own, other = cast("DTensor", value)._local_tensor, param._local_tensor
    if own.shape != other.shape:
        raise AssertionError(f"shards of {own.shape} and {other.shape} rows")
    for name in (_CHUNKS, _WRITES):
        setattr(own, name, getattr(other, name))


@torch.no_grad()
def compact_shard(tensor: DTensor) -> DTensor:
    """Return a copy of the shard with separate storage instead of a view into a flat buffer."""
    copy = cast("DTensor", tensor.detach().clone())
    cut_like(copy, tensor)
    return copy


@torch.no_grad()
def gather_uneven(tensor: DTensor) -> Tensor:
    """Return the full tensor, bitwise. Collective over the tensor's mesh. Ranks may hold shards of any size."""
    full = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    # Shards of different sizes cannot be all-gathered in one call. Each rank fills its part of a full tensor of zeros.
    full[chunk(tensor)] = tensor.to_local()
    # Every element comes from one rank and is zero elsewhere. As bytes, the sum cannot turn -0.0 into 0.0.
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            dist.all_reduce(full.view(-1).view(torch.uint8), group=tensor.device_mesh.get_group(axis))
    return full
