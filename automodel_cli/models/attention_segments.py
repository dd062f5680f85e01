"""Which queries meet which keys: a microbatch as segments, and segments of similar size in one kernel call.

A whole packed row is one segment a document. On a rank of context parallelism it is one segment for each document that
a local chunk touches: the queries in the chunk against that document's keys up to the last of them, which is causal
attention aligned at its end.

Shapes: N local queries, M gathered keys, G segments of a group, S queries and U keys of its longest.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from automodel_cli.models.attention_kernels import VarlenPlan, visible_mask
from automodel_cli.models.context import Context

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(query_GHSD, key_GHUD, value_GHUV, additive mask or None for plain causal) -> out_GHSV"""


class Segment(NamedTuple):
    """A run of queries, `query` being the first in the flat local tokens, and the run of keys that they may see, `key`
    being the first in the flat whole rows."""

    query: int
    num_queries: int
    key: int
    num_keys: int

    @property
    def ahead(self) -> int:
        """How far the first query lies behind the first key: both runs end at the same token."""
        return self.num_keys - self.num_queries


def of_documents(bounds: Sequence[int]) -> tuple[Segment, ...]:
    """Whole documents on one rank; empty ones left out."""
    return tuple(Segment(a, b - a, a, b - a) for a, b in itertools.pairwise(bounds) if b > a)


def of_context(context: Context, window: int | None) -> tuple[Segment, ...]:
    """What this rank computes, in the order of its local tokens, which it covers without a gap. Keys that no query of a
    segment can see through the window are left out."""
    segments, query = [], 0
    for row in range(context.rows):
        for chunk in context.chunks:
            first = row * context.tokens + chunk * context.chunk
            position, end = first, first + context.chunk
            document = bisect.bisect_right(context.bounds, first) - 1
            while position < end:
                start, stop = context.bounds[document], min(end, context.bounds[document + 1])
                key = start if window is None else max(start, position - window + 1)
                segments.append(Segment(query, stop - position, key, stop - key))
                query += stop - position
                position, document = stop, document + 1
    return tuple(segments)


class Group(NamedTuple):
    """Segments that run together, padded on the right by repeating the last token: what they compute is thrown away."""

    query_GS: Tensor
    key_GU: Tensor
    ahead: tuple[int, ...]


def run(
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
    for query_GS, key_GU, ahead in groups:
        q, k, v = (
            x.index_select(0, index.flatten()).unflatten(0, index.shape).transpose(1, 2)
            for x, index in ((query_NHD, query_GS), (key_MHD, key_GU), (value_MHV, key_GU))
        )
        mask = visible_mask(query_GS.shape[1], key_GU.shape[1], ahead, window, q.dtype, q.device)
        parts.append(kernel(q, k, v, mask).transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).index_select(0, back_N)


@functools.lru_cache(maxsize=16)
def document_groups(bounds: tuple[int, ...], device: torch.device) -> tuple[list[Group], Tensor]:
    """Cached: all layers of a microbatch ask for the same."""
    return _grouped(of_documents(bounds), None, device)


@functools.lru_cache(maxsize=16)
def context_groups(context: Context, window: int | None) -> tuple[list[Group], Tensor]:
    """The same on a rank of context parallelism; keys are indices into what the ranks gather."""
    index_M = context.gathered_index()
    return _grouped(of_context(context, window), index_M, index_M.device)


def _grouped(segments: Sequence[Segment], place_M: Tensor | None, device: torch.device) -> tuple[list[Group], Tensor]:
    """Groups, and where each of the N queries lies in the groups' queries one after the other.

    The runs of a group are within a factor of two in length, so padding at most doubles each; it is far less in packed
    rows. `place_M`: where a key of the whole rows lies; None: where it is.
    """
    left = sorted(segments, key=lambda s: (s.num_keys, s.num_queries), reverse=True)
    total = sum(segment.num_queries for segment in segments)
    groups, back_N, taken = [], torch.empty(total, dtype=torch.int64), 0
    while left:
        keys, queries = left[0].num_keys, left[0].num_queries
        members = [s for s in left if 2 * s.num_keys >= keys and queries <= 2 * s.num_queries <= 4 * queries]
        taken_now = set(members)
        left = [s for s in left if s not in taken_now]
        query_GS, is_query_GS = _runs([(s.query, s.num_queries) for s in members])
        key_GU, _ = _runs([(s.key, s.num_keys) for s in members])
        back_N[query_GS[is_query_GS]] = taken + is_query_GS.flatten().nonzero()[:, 0]
        taken += query_GS.numel()
        key_GU = key_GU.to(device)
        groups.append(
            Group(
                query_GS.to(device),
                key_GU if place_M is None else place_M[key_GU],
                tuple(s.ahead for s in members),
            )
        )
    return groups, back_N.to(device)


def _runs(runs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Indices `[runs, longest]` of (first, length) runs, the last one repeated, and which of them are real."""
    first, length = torch.tensor(runs).t()
    offset = torch.arange(int(length.max()))
    return first[:, None] + torch.minimum(offset, length[:, None] - 1), offset < length[:, None]


@functools.lru_cache(maxsize=16)
def context_varlen(context: Context, window: int | None) -> VarlenPlan:
    """This rank's segments in one call."""
    found, index_M = of_context(context, window), context.gathered_index()
    num_queries, num_keys = [s.num_queries for s in found], [s.num_keys for s in found]
    keys = torch.cat([torch.arange(s.key, s.key + s.num_keys) for s in found]).to(index_M.device)

    def bounds(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).to(device=index_M.device, dtype=torch.int32)

    return VarlenPlan(bounds(num_queries), bounds(num_keys), max(num_queries), max(num_keys), index_M[keys])


def batch_varlen(cu: Tensor | None, max_length: int | None, rows: int, length: int, device: torch.device) -> VarlenPlan:
    """Whole documents in one call. Nothing is read on the host."""
    if cu is None:
        cu = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=device)
    longest = max_length or length  # the row is an upper bound: a document never crosses it
    return VarlenPlan(cu, cu, longest, longest, None)
