"""The sequences of one lane: those of each dataset, mixed by shares of the tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, NamedTuple, TypedDict

import numpy as np

from automodel_cli.config.errors import DataError
from automodel_cli.data.preparation.row_stream import shuffled
from automodel_cli.data.storage.memmap_store import PackedStore
from automodel_cli.data.streaming.blocks import Block, BlockBuilder, LeftOut
from automodel_cli.data.streaming.lane_reader import START, LaneReader, Place

Submit = Callable[[Callable[[], Block]], "Future[Block]"]


class SourceState(TypedDict):
    """Where a lane is in one dataset: its block, and the sequences taken from it. JSON values."""

    begin: list[int]
    block: int
    rows: int | None
    taken: int
    left_out: dict[str, Any]


class LaneState(TypedDict):
    """Where a lane is in each dataset, and the tokens taken of each. JSON values."""

    sources: list[SourceState]
    tokens: list[int]
    base: list[int]
    phase: int


class Taken(NamedTuple):
    """A sequence: index of its dataset, its block, and its index in the block."""

    source: int
    store: PackedStore
    row: int

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        first, last = self.store.row_offsets[self.row : self.row + 2]
        return int(self.store.offsets[last] - self.store.offsets[first])


class SourceLane:
    """The sequences of one dataset in one lane. The next block is built while one is used."""

    def __init__(self, reader: LaneReader, builder: BlockBuilder, submit: Submit, *, block_rows: int):
        self._reader, self._builder, self._submit, self._most = reader, builder, submit, block_rows
        self._begin, self._number, self._offset = START, 0, 0
        self._exactly: int | None = None
        self._before = LeftOut()  # of the blocks before this one
        self._block: Block | None = None
        self._ahead: Future[Block] | None = None
        self._permuted = np.zeros(0, np.int64)

    def prefetch(self) -> None:
        """Start to build the current block."""
        if self._ahead is None and self._block is None:
            begin, exactly = self._begin, self._exactly
            self._ahead = self._submit(lambda: self._built(begin, exactly))

    def _built(self, begin: Place, exactly: int | None = None) -> Block:
        return self._builder.build(self._reader.read(begin, self._most, exactly=exactly))

    def next(self, source: int) -> Taken:
        """Return the next sequence without taking it. Waits for its block."""
        first_pass = self._begin[0]
        while self._block is None or self._offset == self._block.num_sequences:
            if self._block is not None:
                self._before.add(self._block.left_out)
                self._begin, self._number, self._offset = self._block.end, self._number + 1, 0
                self._exactly, self._block = None, None
                # More than two passes without a usable row. Without this check, the loop would read the files forever.
                if self._begin[0] > first_pass + 2:
                    raise DataError(
                        f"no row of {self._reader.source.name} can be used", code="not_enough_rows", keys=("data.path",)
                    )
            self.prefetch()
            assert self._ahead is not None
            self._block, self._ahead = self._ahead.result(), None
            end = self._block.end
            self._ahead = self._submit(functools.partial(self._built, end))
            order, size = self._reader.order, self._block.num_sequences
            seeds = order.seed, 5, order.dataset, self._reader.lane, self._number
            # Two levels of shuffling: shards of a pass, and sequences of a block. A full shuffle would need all data in
            # memory.
            self._permuted = shuffled(size, *seeds) if order.shuffle else np.arange(size)
        assert self._block.store is not None
        return Taken(source, self._block.store, int(self._permuted[self._offset]))

    def take(self) -> None:
        """Move on to the next sequence."""
        self._offset += 1

    def left_out(self) -> LeftOut:
        """Return what was left out so far."""
        out = LeftOut()
        for part in (self._before, *((self._block.left_out,) if self._block is not None else ())):
            out.add(part)
        return out

    def state(self) -> SourceState:
        """Return the place of the current block, its number, its rows, and the sequences taken from it."""
        return {
            "begin": list(self._begin),
            "block": self._number,
            # The number of rows is stored: a resumed run builds the same block even if the limit of bytes or the files
            # changed.
            "rows": self._exactly if self._block is None else self._block.num_rows,
            "taken": self._offset,
            "left_out": asdict(self._before),
        }

    def load(self, state: SourceState) -> None:
        """Continue from a state."""
        nth, shard, row = state["begin"]
        self._begin, self._number, self._offset = (nth, shard, row), state["block"], state["taken"]
        self._exactly, self._block, self._ahead = state["rows"], None, None
        self._before = LeftOut(**state["left_out"])


class Lane:
    """The sequences of one lane. Shares are exact to about one sequence, as in `preparation.row_stream.TokenBlend`."""

    def __init__(self, sources: Sequence[SourceLane]):
        self.sources = list(sources)
        self.tokens = [0] * len(sources)
        """Tokens of each dataset so far."""
        self._base, self._phase = [0] * len(sources), 0

    def prefetch(self) -> None:
        """Start to build the first blocks."""
        for source in self.sources:
            source.prefetch()

    # Example: shares 0.75 and 0.25, sequences of 100 tokens. Each is due at (tokens so far + 50) / share, the middle of
    # the sequence: 67 and 200 at first. The order is 0 0 1 0 0 0 1 0. At equal due times, the first dataset wins.
    def take(self, phase: int, shares: Sequence[float]) -> Taken:
        """Take the sequence that is due next. Shares of a phase are counted from its begin."""
        if phase != self._phase:
            # Shares are counted anew. Otherwise a dataset whose share rises would first catch up for the time before.
            self._base, self._phase = list(self.tokens), phase
        best: tuple[float, Taken] | None = None
        for number, (source, share) in enumerate(zip(self.sources, shares, strict=True)):
            if share:
                found = source.next(number)
                due = (self.tokens[number] - self._base[number] + found.num_tokens / 2) / share
                if best is None or due < best[0]:
                    best = due, found
        assert best is not None, "one share is positive"
        taken = best[1]
        self.sources[taken.source].take()
        self.tokens[taken.source] += taken.num_tokens
        return taken

    def state(self) -> LaneState:
        """Return the state of every dataset, and the tokens taken of each."""
        return {
            "sources": [source.state() for source in self.sources],
            "tokens": list(self.tokens),
            "base": list(self._base),
            "phase": self._phase,
        }

    def load(self, state: LaneState) -> None:
        """Continue from a state."""
        for source, of_source in zip(self.sources, state["sources"], strict=True):
            source.load(of_source)
        self.tokens, self._base, self._phase = list(state["tokens"]), list(state["base"]), state["phase"]
