"""Segments of a microbatch: which queries attend to which keys, grouped by size for few kernel calls.

On one rank, every document is one segment. If documents share a prefix, the keys of the prefix precede those of each
document. Attention is then still causal and aligned at the end of the segment.

On a context-parallel rank, there is one segment per document and local chunk. It contains the queries of the chunk and
the keys of the document up to the last query, again causal and aligned at the end. Example: rows of 8 tokens, 2 ranks,
chunks of 2. Rank 0 has chunks 0 and 3. For one document per row, its segments are queries 0-1 with keys 0-1, and
queries 6-7 with keys 0-7.

Shapes: N local queries, M gathered keys, G segments of a group, S queries and U keys of its longest segment.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from automodel_cli.data.batch import NO_RUN, Run, SeenKeys, seen_index
from automodel_cli.models.attention.dense import visible_mask
from automodel_cli.models.attention.kernels import VarlenPlan, picked
from automodel_cli.models.context_parallel_layout import Context

_SHORT_ROW = 192  # tokens. On a CPU, a longer mask costs more than regrouping documents.
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(query_GHSD, key_GHUD, value_GHUV, additive mask or None for plain causal) -> out_GHSV"""


class Segment(NamedTuple):
    """A run of queries and the run of keys that they may see.

    query: index of the first query in the flat local tokens.
    key: index of the first key in the flat tokens of the full rows.
    """

    query: int
    num_queries: int
    key: int
    num_keys: int
    ahead: int
    """Distance from the first key to the first query."""


class HostDocuments(NamedTuple):
    """Document boundaries on the host.

    bounds: boundaries over the flat tokens.
    prefixes: for each document, the run of tokens that it sees before its own. Empty if no document has a prefix.
    """

    bounds: tuple[int, ...]
    prefixes: tuple[Run, ...] = ()

    @classmethod
    def of(cls, cu: Tensor | None, rows: int, length: int, seen: SeenKeys | None) -> HostDocuments:
        """Copy boundaries from the device, which synchronizes. Without boundaries, every row is a document."""
        if cu is None:
            return cls(tuple(range(0, rows * length + 1, length)))
        if seen is None:
            return cls(tuple(cu.tolist()))
        return cls(tuple(cu.tolist()), tuple(zip(*(x.tolist() for x in seen.prefixes(cu)), strict=True)))

    def are_rows(self, rows: int) -> bool:
        """Return whether every row is one document."""
        return len(self.bounds) == rows + 1 and not self.prefixes


def document_segments(documents: HostDocuments) -> tuple[Segment, ...]:
    """Return one segment per non-empty document.

    Keys are counted through all documents including their prefixes (`seen_index`).
    """
    segments, key = [], 0
    before = [length for _, length in documents.prefixes] or itertools.repeat(0)
    for (start, end), ahead in zip(itertools.pairwise(documents.bounds), before, strict=False):
        num_keys = end - start + ahead
        if end > start:
            segments.append(Segment(start, end - start, key, num_keys, ahead))
        key += num_keys
    return tuple(segments)


def context_segments(context: Context, window: int | None, key_chunk: int | None = None) -> tuple[Segment, ...]:
    """Return the segments of this context-parallel rank in the order of its local tokens.

    Keys outside the window of all queries of a segment are excluded.

    Args:
        key_chunk: None: all keys. Each local token is in exactly one segment, whose queries and keys end at the same
            token. An index: only the keys of this chunk of the rows. Each local token is in at most one segment.
    """
    # Example: a row of 7 tokens with documents 0-2 and 3-6, padded to 8, 2 ranks. Rank 1 holds tokens 2 3 4 5, chunks 1
    # and 2 of the row. Its segments are query 2 with keys 0-2, query 3 with key 3, and queries 4-5 with keys 3-5. The
    # last two are one document in two chunks.
    segments = []
    # Keys from the start of the document to the last query of the piece, less those outside the window.
    for query, row, position, stop, start in _pieces(context):
        # `position` is the first query and `stop` the end of the piece. A query at p sees keys from p - window + 1 on.
        key, key_stop, last = start if window is None else max(start, position - window + 1), stop, stop
        if key_chunk is not None:
            # Intersect with the key chunk. With a window, later queries see no key of the chunk and are excluded.
            first = row * context.tokens + key_chunk * context.chunk
            key, key_stop = max(key, first), min(stop, first + context.chunk)
            last = stop if window is None else min(stop, key_stop + window - 1)
        if key < key_stop:
            segments.append(Segment(query, last - position, key, key_stop - key, position - key))
    return tuple(segments)


def _pieces(context: Context) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield each document of each local chunk.

    The values are: first local token, row, first and end position in the flat full rows, start of the document.
    """
    query = 0
    for row in range(context.rows):
        for chunk in context.chunks:
            position = row * context.tokens + chunk * context.chunk
            end = position + context.chunk
            # The document that contains the first token of the chunk. It may have started on another rank.
            document = bisect.bisect_right(context.bounds, position) - 1
            while position < end:
                stop = min(end, context.bounds[document + 1])
                yield query, row, position, stop, context.bounds[document]
                query += stop - position
                position, document = stop, document + 1


class Group(NamedTuple):
    """Segments that run in one kernel call.

    Shorter segments repeat their last token on the right. The outputs of repeated tokens are discarded.
    """

    query_GS: Tensor
    key_GU: Tensor
    real_GS: Tensor
    """Which queries are not padding."""
    num_keys: tuple[int, ...]
    ahead: tuple[int, ...]

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """See `dense.visible_mask`."""
        return visible_mask(self.query_GS.shape[1], self.num_keys, self.ahead, window, dtype, self.query_GS.device)


def run_grouped(
    kernel: Kernel,
    query_NHD: Tensor,
    key_MHD: Tensor,
    value_MHV: Tensor,
    groups: Sequence[Group],
    back_N: Tensor,
    window: int | None,
) -> Tensor:
    """Run `kernel` once per group and return `[N, H, V]`.

    One call per segment would cost more than the attention itself if rows contain many short documents.
    """
    parts = []
    for group in groups:
        # [N, H, D] -> [G, S, H, D] -> (G, H, S, D), and keys and values [M, ...] -> (G, kv heads, U, ...)
        q, k, v = (
            picked(x, index.flatten()).unflatten(0, index.shape).transpose(1, 2)
            for x, index in ((query_NHD, group.query_GS), (key_MHD, group.key_GU), (value_MHV, group.key_GU))
        )
        # (G, H, S, V) -> [G * S, H, V], padding included
        parts.append(kernel(q, k, v, group.mask(window, q.dtype)).transpose(1, 2).flatten(0, 1))
    # drop the padding, and put the queries back in the order of the rows: [N, H, V]
    return torch.cat(parts).index_select(0, back_N)


@functools.lru_cache(maxsize=4)  # with and without a window, two microbatches: masks are large
def row_mask(
    documents: HostDocuments, length: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Return the additive mask `[B, 1, T, T]`: 0 where a query sees a key of its row, -inf elsewhere.

    A kernel can then run on unchanged rows, without copies. Returns None if rows are too long for a mask, or if a
    document has its prefix in another row.
    """
    starts = documents.bounds[:-1]
    prefixes = documents.prefixes or (NO_RUN,) * len(starts)
    elsewhere = (
        ahead and first // length != start // length for start, (first, ahead) in zip(starts, prefixes, strict=True)
    )
    if length > _SHORT_ROW or any(elsewhere):
        return None
    # table[i, j]: query at position i of its document, key at position j. Positions count the prefix first.
    sees = np.tri(length, dtype=bool)
    if window is not None:
        sees &= ~np.tri(length, k=-window, dtype=bool)
    table = np.where(sees, np.float32(0), np.float32(-np.inf))
    mask_NT = np.full((documents.bounds[-1], length), -np.inf, np.float32)
    for (start, end), (first, ahead) in zip(itertools.pairwise(documents.bounds), prefixes, strict=True):
        # Own tokens attend to own tokens, and to the prefix wherever it is in the row.
        at, stop = start % length, ahead + end - start
        mask_NT[start:end, at : at + end - start] = table[ahead:stop, ahead:stop]
        mask_NT[start:end, first % length : first % length + ahead] = table[ahead:stop, :ahead]
    return torch.from_numpy(mask_NT).view(-1, 1, length, length).to(device, dtype)


@functools.lru_cache(maxsize=16)
def document_groups(documents: HostDocuments, device: torch.device) -> tuple[list[Group], Tensor]:
    """Return the groups of documents. Cached, because all layers of a microbatch need the same."""
    key_position_M = seen_index(*documents).to(device) if documents.prefixes else None
    return group_by_length(document_segments(documents), key_position_M, device)


@functools.lru_cache(maxsize=16)
def context_groups(context: Context, window: int | None) -> tuple[list[Group], Tensor]:
    """Return the groups of a context-parallel rank. Keys are indices into the gathered keys."""
    index_M = context.gathered_index()
    return group_by_length(context_segments(context, window), index_M, index_M.device)


def group_by_length(
    segments: Sequence[Segment], key_position_M: Tensor | None, device: torch.device
) -> tuple[list[Group], Tensor]:
    """Group segments of similar length. Each query must be in exactly one segment.

    The lengths in a group differ at most by a factor of two, so padding at most doubles each. In packed rows it is far
    less.

    Args:
        key_position_M: maps a key of the full rows to its index in the tensor of keys. None: identity.

    Returns:
        The groups, and `back_N`: the index of each of the N queries in the concatenated outputs of all groups.
    """
    # Example: lengths 5, 1, 3. The group of 5 accepts 3 (2 * 3 >= 5) and pads it to 5. The document of 1 is a group of
    # its own. back_N is [0 1 2 3 4, 10, 5 6 7]: the single token comes after the 2 * 5 outputs of the first group.
    remaining = sorted(segments, key=lambda s: (s.num_keys, s.num_queries), reverse=True)
    total = max(segment.query + segment.num_queries for segment in segments)
    groups, back_N, num_grouped = [], torch.empty(total, dtype=torch.int64), 0
    while remaining:
        # 1. the longest segment remaining opens a group: all segments of its size join it
        keys, queries = remaining[0].num_keys, remaining[0].num_queries
        members = [s for s in remaining if 2 * s.num_keys >= keys and queries <= 2 * s.num_queries <= 4 * queries]
        grouped = set(members)
        remaining = [s for s in remaining if s not in grouped]
        # 2. runs to index matrices: G segments, S queries and U keys each, padded to the longest
        query_GS, is_query_GS = _runs([(s.query, s.num_queries) for s in members])
        key_GU, _ = _runs([(s.key, s.num_keys) for s in members])
        # 3. remember where each real query of this group comes out: after the `num_grouped` queries of earlier groups
        back_N[query_GS[is_query_GS]] = num_grouped + is_query_GS.flatten().nonzero()[:, 0]
        num_grouped += query_GS.numel()
        # 4. keys of the whole rows -> keys as this rank holds them
        place = key_GU.to(device) if key_position_M is None else key_position_M[key_GU.to(device)]
        num_keys, ahead = tuple(s.num_keys for s in members), tuple(s.ahead for s in members)
        groups.append(Group(query_GS.to(device), place, is_query_GS.to(device), num_keys, ahead))
    return groups, back_N.to(device)


def _runs(runs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Return indices `[runs, longest]` of (first, length) runs, padded with the last index, and a mask of real ones."""
    first, length = torch.tensor(runs).t()
    offset = torch.arange(int(length.max()))
    return first[:, None] + torch.minimum(offset, length[:, None] - 1), offset < length[:, None]


@functools.lru_cache(maxsize=16)
def context_varlen(context: Context, window: int | None) -> VarlenPlan:
    """Return the segments of a context-parallel rank as one call. Keys are indices into the gathered keys."""
    return varlen_plan(context_segments(context, window), context.gathered_index())


def varlen_plan(segments: Sequence[Segment], key_position_M: Tensor) -> VarlenPlan:
    """Concatenate segments to one call. `key_position_M` maps a key of the full rows to its index."""
    num_queries, num_keys = [s.num_queries for s in segments], [s.num_keys for s in segments]
    keys = torch.cat([torch.arange(s.key, s.key + s.num_keys) for s in segments]).to(key_position_M.device)

    def bounds(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(device=key_position_M.device, dtype=torch.int32)

    return VarlenPlan(bounds(num_queries), bounds(num_keys), max(num_queries), max(num_keys), key_position_M[keys])


def batch_varlen(
    cu: Tensor | None, max_length: int | None, rows: int, length: int, device: torch.device, seen: SeenKeys | None
) -> VarlenPlan:
    """Return the documents of a batch as one call, without host synchronization."""
    if cu is None:
        cu = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)
    longest = max_length or length  # the row is an upper bound: a document never crosses it
    if seen is not None:
        return VarlenPlan(cu, seen.cu_seqlens, longest, seen.max_seqlen, seen.index_M)
    return VarlenPlan(cu, cu, longest, longest, None)
