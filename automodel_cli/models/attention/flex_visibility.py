"""Keys that each query of packed rows sees, as intervals and as block masks of FlexAttention.

Every query sees one run of positions: from the start of its document or window to itself. If documents share a prefix,
a second run covers the visible part of the prefix. Two integers per query (four with prefixes) and one per key describe
documents, windows and the reordered rows of context parallelism. Example: documents of 3 and 2 tokens with window 2
give position = 0 1 2 3 4 and lower = 0 0 1 3 3.

From these integers follows which blocks of 128 x 128 are skipped, which are fully visible, and which evaluate the mask.
They are computed on the device, once per microbatch and window, and shared by all layers.

Shapes: N queries, M keys.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from automodel_cli.data.batch import SeenKeys
from automodel_cli.distributed.typed_torch import disable
from automodel_cli.models.context_parallel_layout import Context

_BLOCK = 128


class Visible(NamedTuple):
    """The keys that each query sees, as int32 positions in the flat full rows.

    Query n sees the keys at positions `lower_N[n]` to `position_N[n]`, inclusive. With `prefix`, it also sees those
    from `prefix[0][n]` to before `prefix[1][n]`.
    """

    position_N: Tensor
    lower_N: Tensor
    key_position_M: Tensor
    blocks: BlockMask
    prefix: tuple[Tensor, Tensor] | None = None

    def computed_pairs(self, real: Callable[[Tensor], Tensor | None] = lambda x: x) -> int:
        """Return the number of query-key pairs in blocks that are not skipped.

        `real` returns the values of a tensor, for tensors without values.
        """
        assert self.blocks.full_kv_num_blocks is not None
        counts = [real(count) for count in (self.blocks.kv_num_blocks, self.blocks.full_kv_num_blocks)]
        return sum(int(count.sum()) for count in counts if count is not None) * _BLOCK**2


@disable()
def batch_visibility(
    cu: Tensor | None,
    rows: int,
    length: int,
    window: int | None,
    device: torch.device,
    seen: SeenKeys | None = None,
) -> Visible:
    """Return the visible keys of full documents.

    Computed once per `cu` (by identity) and window, without host synchronization.
    """
    if cu is None:
        return _row_visibility(rows, length, window, device)
    # All layers of a microbatch pass the same `cu`. The weak reference removes the entry with the tensor, because ids
    # are reused.
    cached = _visibility_cache.setdefault(id(cu), (weakref.ref(cu, _forget(id(cu))), {}))[1]
    if (rows * length, window) not in cached:
        prefix = None if seen is None else _prefix_bounds(cu, seen, rows * length, window)
        cached[rows * length, window] = visible_intervals(*document_positions(cu, rows * length, window), prefix)
    return cached[rows * length, window]


_visibility_cache: dict[int, tuple[weakref.ref[Tensor], dict[tuple[int, int | None], Visible]]] = {}


def _forget(key: int) -> Callable[[object], None]:
    return lambda _, cached=_visibility_cache: cached.pop(key, None)  # type: ignore[misc]


@functools.lru_cache(maxsize=16)
def _row_visibility(rows: int, length: int, window: int | None, device: torch.device) -> Visible:
    cu = torch.arange(0, rows * length + 1, length, device=device)
    return visible_intervals(*document_positions(cu, rows * length, window))


@disable()
@functools.lru_cache(maxsize=64)
def context_visibility(context: Context, window: int | None, of_rank: int | None = None) -> Visible:
    """Return the visible keys of the local queries, among the gathered keys of all ranks or those of one rank."""
    index_M = context.gathered_index()
    cu = torch.tensor(context.bounds, device=index_M.device)
    position, lower, _ = document_positions(cu, len(index_M), window)
    own_N = context.global_index()
    key_position_M = torch.empty_like(position)
    # Keys arrive in the order of ranks. Scatter the positions of the full rows to that order.
    key_position_M[index_M] = position
    if of_rank is not None:
        key_position_M = key_position_M.unflatten(0, (context.group.size, -1))[of_rank].contiguous()
    return visible_intervals(position[own_N], lower[own_N], key_position_M)


def document_positions(cu: Tensor, num_tokens: int, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each token of concatenated documents: position, lowest visible position, key position."""
    # Example: cu 0 3 5 and window 2. Positions 0 1 2 3 4, lowest visible key 0 0 1 3 3: the window, or the start of the
    # document if that is later.
    position, document = _document_of(cu, num_tokens)
    lower = cu[document].to(torch.int32)
    if window is not None:
        # Window W sees W keys including the own position.
        lower = torch.maximum(lower, position - (window - 1))
    return position, lower, position


def _document_of(cu: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the position of each token and the index of its document."""
    position = torch.arange(num_tokens, dtype=torch.int32, device=cu.device)
    return position, torch.searchsorted(cu[1:].contiguous(), position.to(cu.dtype), right=True)


def _prefix_bounds(cu: Tensor, seen: SeenKeys, num_tokens: int, window: int | None) -> tuple[Tensor, Tensor]:
    """Return the first and end position of the visible part of each token's prefix.

    The values are (largest integer, 0) if nothing is visible.
    """
    position, document = _document_of(cu, num_tokens)
    start, length = (x[document] for x in seen.prefixes(cu))
    first, stop = start, start + length
    if window is not None:  # the part of the last W tokens before the own document
        first = torch.maximum(start, stop - (window - 1) + (position - cu[document]))
    nothing = first >= stop
    first = first.masked_fill(nothing, torch.iinfo(torch.int32).max)
    return first.to(torch.int32), stop.masked_fill(nothing, 0).to(torch.int32)


def visible_intervals(
    position_N: Tensor, lower_N: Tensor, key_position_M: Tensor, prefix: tuple[Tensor, Tensor] | None = None
) -> Visible:
    """Build the block mask from positions. A block is skipped, fully visible, or evaluates the mask."""

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        at = key_position_M[key]
        own = (at <= position_N[query]) & (at >= lower_N[query])
        return own if prefix is None else own | ((at >= prefix[0][query]) & (at < prefix[1][query]))

    # Smallest and largest value in each block of 128 queries or keys.
    first, last = _ends(position_N)
    least, most = _ends(lower_N)
    key_first, key_last = (x[None] for x in _ends(key_position_M))
    # Possibly visible: the ranges of keys and of visible positions overlap. All other blocks are skipped.
    touched = (key_last >= least[:, None]) & (key_first <= last[:, None])
    # The last block may contain padding, which only the mask excludes.
    whole_Q, whole_K = (torch.arange(1, len(x) + 1, device=x.device) * _BLOCK for x in (first, key_first[0]))
    inside = (whole_Q <= len(position_N))[:, None] & (whole_K <= len(key_position_M))
    # Fully visible: every key of the block is visible to every query of the block.
    full = (key_first >= most[:, None]) & (key_last <= first[:, None])
    if prefix is not None:
        (earliest, latest), (least_stop, most_stop) = _ends(prefix[0]), _ends(prefix[1])
        touched |= (key_last >= earliest[:, None]) & (key_first < most_stop[:, None])
        full |= (key_first >= latest[:, None]) & (key_last < least_stop[:, None])
    full &= inside
    blocks = BlockMask.from_kv_blocks(
        *_listed(touched & ~full),
        *_listed(full),
        BLOCK_SIZE=_BLOCK,
        mask_mod=seen,
        seq_lengths=(len(position_N), len(key_position_M)),
    )
    return Visible(position_N, lower_N, key_position_M, blocks, prefix)


def _ends(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the minimum and maximum of each block. The last block is padded with its last value."""
    padded = torch.cat([x, x[-1:].expand(-len(x) % _BLOCK)]).view(-1, _BLOCK)
    return padded.amin(1), padded.amax(1)


def _listed(blocks_QK: Tensor) -> tuple[Tensor, Tensor]:
    """Return the number of selected key blocks per query block, and their indices first in each row."""
    order_QK = blocks_QK.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return blocks_QK.sum(1, dtype=torch.int32)[None, None], order_QK.to(torch.int32)[None, None]
