"""Which queries meet which keys: a microbatch as segments, and segments of similar size in one kernel call, or, where
rows are short, rows as they are under a mask.

A whole packed row is one segment a document; where documents share a prefix, its keys stand before those of each, so
that attention is still causal and aligned at its end. On a rank of context parallelism it is one segment for each
document that a local chunk touches: the queries in the chunk against that document's keys up to the last of them, which
is causal attention aligned at its end.

Shapes: N local queries, M gathered keys, G segments of a group, S queries and U keys of its longest.
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
from automodel_cli.models.attention.kernels import VarlenPlan, picked, visible_mask
from automodel_cli.models.context_parallel_layout import Context

_SHORT_ROW = 192  # tokens: a mask over more costs more on a CPU than putting documents together
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(query_GHSD, key_GHUD, value_GHUV, additive mask or None for plain causal) -> out_GHSV"""


class Segment(NamedTuple):
    """A run of queries, `query` being the first in the flat local tokens, and the run of keys that they may see, `key`
    being the first in the flat whole rows."""

    query: int
    num_queries: int
    key: int
    num_keys: int
    ahead: int
    """How far the first query lies behind the first key."""


class HostDocuments(NamedTuple):
    """Documents on the host: their bounds over the flat tokens, and of each the run of tokens that it sees before its
    own (none has one where `prefixes` is empty)."""

    bounds: tuple[int, ...]
    prefixes: tuple[Run, ...] = ()

    @classmethod
    def of(cls, cu: Tensor | None, rows: int, length: int, seen: SeenKeys | None) -> HostDocuments:
        """Without bounds, rows are documents. Waits for the device."""
        if cu is None:
            return cls(tuple(range(0, rows * length + 1, length)))
        if seen is None:
            return cls(tuple(cu.tolist()))
        return cls(tuple(cu.tolist()), tuple(zip(*(x.tolist() for x in seen.prefixes(cu)), strict=True)))

    def are_rows(self, rows: int) -> bool:
        """Whether every row is one document."""
        return len(self.bounds) == rows + 1 and not self.prefixes


def of_documents(documents: HostDocuments) -> tuple[Segment, ...]:
    """Whole documents on one rank, empty ones left out. Keys are counted through all documents, prefixes included
    (`seen_index`)."""
    found, key = [], 0
    before = [length for _, length in documents.prefixes] or itertools.repeat(0)
    for (start, end), ahead in zip(itertools.pairwise(documents.bounds), before, strict=False):
        num_keys = end - start + ahead
        if end > start:
            found.append(Segment(start, end - start, key, num_keys, ahead))
        key += num_keys
    return tuple(found)


def of_context(context: Context, window: int | None, key_chunk: int | None = None) -> tuple[Segment, ...]:
    """What this rank computes, in the order of its local tokens. Keys that no query of a segment can see through the
    window are left out.

    With all keys both runs of a segment end at the same token, and every local token is in one segment. With only those
    in one chunk of the rows, every local token is in one segment at most: those that see none of them are left out.
    """
    found = []
    for query, row, position, stop, start in _pieces(context):
        key, key_stop, last = start if window is None else max(start, position - window + 1), stop, stop
        if key_chunk is not None:
            first = row * context.tokens + key_chunk * context.chunk
            key, key_stop = max(key, first), min(stop, first + context.chunk)
            last = stop if window is None else min(stop, key_stop + window - 1)
        if key < key_stop:
            found.append(Segment(query, last - position, key, key_stop - key, position - key))
    return tuple(found)


def _pieces(context: Context) -> Iterator[tuple[int, int, int, int, int]]:
    """Each document in each local chunk: (first local token, row, first and end position in the flat whole rows, start
    of the document)."""
    query = 0
    for row in range(context.rows):
        for chunk in context.chunks:
            position = row * context.tokens + chunk * context.chunk
            end = position + context.chunk
            document = bisect.bisect_right(context.bounds, position) - 1
            while position < end:
                stop = min(end, context.bounds[document + 1])
                yield query, row, position, stop, context.bounds[document]
                query += stop - position
                position, document = stop, document + 1


class Group(NamedTuple):
    """Segments that run together, padded on the right by repeating the last token: what they compute is thrown away."""

    query_GS: Tensor
    key_GU: Tensor
    real_GS: Tensor
    """Which queries are no padding."""
    num_keys: tuple[int, ...]
    ahead: tuple[int, ...]

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """See `attention_kernels.visible_mask`."""
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
    """Run `kernel` group by group: one call per segment would cost more than the attention itself on rows of many short
    documents. Returns `[N, H, V]`."""
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


@functools.lru_cache(maxsize=4)  # a layer with a window and one without, of two microbatches: masks take room
def row_mask(
    documents: HostDocuments, length: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Additive `[B, 1, T, T]`, 0 where a query sees a key of its row and -inf elsewhere: a kernel then takes rows as
    they lie, and nothing is copied together. None where rows of `length` tokens are too long for that, and where a
    document has its prefix in another row.
    """
    starts = documents.bounds[:-1]
    prefixes = documents.prefixes or (NO_RUN,) * len(starts)
    elsewhere = (
        ahead and first // length != start // length for start, (first, ahead) in zip(starts, prefixes, strict=True)
    )
    if length > _SHORT_ROW or any(elsewhere):
        return None
    # Of a query at each position of its document, the keys by theirs: those of a prefix count before its own.
    sees = np.tri(length, dtype=bool)
    if window is not None:
        sees &= ~np.tri(length, k=-window, dtype=bool)
    table = np.where(sees, np.float32(0), np.float32(-np.inf))
    mask_NT = np.full((documents.bounds[-1], length), -np.inf, np.float32)
    for (start, end), (first, ahead) in zip(itertools.pairwise(documents.bounds), prefixes, strict=True):
        at, stop = start % length, ahead + end - start
        mask_NT[start:end, at : at + end - start] = table[ahead:stop, ahead:stop]
        mask_NT[start:end, first % length : first % length + ahead] = table[ahead:stop, :ahead]
    return torch.from_numpy(mask_NT).view(-1, 1, length, length).to(device, dtype)


@functools.lru_cache(maxsize=16)
def document_groups(documents: HostDocuments, device: torch.device) -> tuple[list[Group], Tensor]:
    """Cached: all layers of a microbatch ask for the same."""
    place_M = seen_index(*documents).to(device) if documents.prefixes else None
    return group_by_length(of_documents(documents), place_M, device)


@functools.lru_cache(maxsize=16)
def context_groups(context: Context, window: int | None) -> tuple[list[Group], Tensor]:
    """The same on a rank of context parallelism; keys are indices into what the ranks gather."""
    index_M = context.gathered_index()
    return group_by_length(of_context(context, window), index_M, index_M.device)


def group_by_length(
    segments: Sequence[Segment], place_M: Tensor | None, device: torch.device
) -> tuple[list[Group], Tensor]:
    """Sort segments by length into groups. Returns the groups, and `back_N`: the place of each of the N queries where
    the queries of all groups stand one after another. Each query must be in one segment.

    The runs of a group are within a factor of two in length, so padding at most doubles each; it is far less in packed
    rows. `place_M` maps a key of the whole rows to its index in the tensor of keys; None leaves it as it is.
    """
    left = sorted(segments, key=lambda s: (s.num_keys, s.num_queries), reverse=True)
    total = max(segment.query + segment.num_queries for segment in segments)
    groups, back_N, taken = [], torch.empty(total, dtype=torch.int64), 0
    while left:
        # 1. the longest segment left opens a group: all segments of its size join it
        keys, queries = left[0].num_keys, left[0].num_queries
        members = [s for s in left if 2 * s.num_keys >= keys and queries <= 2 * s.num_queries <= 4 * queries]
        taken_now = set(members)
        left = [s for s in left if s not in taken_now]
        # 2. runs to index matrices: G segments, S queries and U keys each, padded to the longest
        query_GS, is_query_GS = _runs([(s.query, s.num_queries) for s in members])
        key_GU, _ = _runs([(s.key, s.num_keys) for s in members])
        # 3. remember where each real query of this group comes out: after the `taken` queries of earlier groups
        back_N[query_GS[is_query_GS]] = taken + is_query_GS.flatten().nonzero()[:, 0]
        taken += query_GS.numel()
        # 4. keys of the whole rows -> keys as this rank holds them
        place = key_GU.to(device) if place_M is None else place_M[key_GU.to(device)]
        num_keys, ahead = tuple(s.num_keys for s in members), tuple(s.ahead for s in members)
        groups.append(Group(query_GS.to(device), place, is_query_GS.to(device), num_keys, ahead))
    return groups, back_N.to(device)


def _runs(runs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Indices `[runs, longest]` of (first, length) runs, the last one repeated, and which of them are real."""
    first, length = torch.tensor(runs).t()
    offset = torch.arange(int(length.max()))
    return first[:, None] + torch.minimum(offset, length[:, None] - 1), offset < length[:, None]


@functools.lru_cache(maxsize=16)
def context_varlen(context: Context, window: int | None) -> VarlenPlan:
    """This rank's segments in one call; keys are indices into what the ranks gather."""
    return varlen_plan(of_context(context, window), context.gathered_index())


def varlen_plan(segments: Sequence[Segment], place_M: Tensor) -> VarlenPlan:
    """Segments one after another. `place_M`: where a key of the whole rows lies."""
    num_queries, num_keys = [s.num_queries for s in segments], [s.num_keys for s in segments]
    keys = torch.cat([torch.arange(s.key, s.key + s.num_keys) for s in segments]).to(place_M.device)

    def bounds(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(device=place_M.device, dtype=torch.int32)

    return VarlenPlan(bounds(num_queries), bounds(num_keys), max(num_queries), max(num_keys), place_M[keys])


def batch_varlen(
    cu: Tensor | None, max_length: int | None, rows: int, length: int, device: torch.device, seen: SeenKeys | None
) -> VarlenPlan:
    """Whole documents in one call. Nothing is read on the host."""
    if cu is None:
        cu = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)
    longest = max_length or length  # the row is an upper bound: a document never crosses it
    if seen is not None:
        return VarlenPlan(cu, seen.cu_seqlens, longest, seen.max_seqlen, seen.index_M)
    return VarlenPlan(cu, cu, longest, longest, None)
