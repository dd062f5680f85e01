"""Rows of one lane of a streamed dataset, from any place on.

A lane owns a fixed part of the shards. It reads them one after another, in a new order on every pass. A place is
(pass, shard of the pass, row of the shard), so it does not depend on the ranks, nor on what was read before.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from automodel_cli.config.errors import DataError
from automodel_cli.config.warn import warn
from automodel_cli.data.json_reader import NumberedRow
from automodel_cli.data.preparation.row_stream import shuffled
from automodel_cli.data.row_errors import DAMAGED, RowError, SourceRow, is_damaged
from automodel_cli.data.source_config import TxtRows
from automodel_cli.data.sources.remote_files import unreadable
from automodel_cli.data.streaming.prepared_source import PreparedSource
from automodel_cli.data.streaming.stream_source import KnownFile, Shard, StreamSource, place_of, plan_shards
from automodel_cli.data.tokenized import Encoded

MOST_BYTES = 16 << 20
"""Characters of the rows of a block, so that long documents do not fill the memory."""
_ATTEMPTS, _PAUSE = 3, 2.0

Place = tuple[int, int, int]
START: Place = (0, 0, 0)


@dataclass
class Chunk:
    """Rows of one block. `files`: names that `SourceRow.file` counts. `damaged`: shards that were left out."""

    end: Place
    rows: list[SourceRow] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def add(self, name: str, line: int, row: object) -> None:
        """Append a row."""
        if name not in self.files:
            self.files.append(name)
        self.rows.append(SourceRow(self.files.index(name), line, row))


@dataclass(frozen=True)
class LaneOrder:
    """Which shards a lane reads, and in which order.

    `generations`: files that became known together, in the order in which they did. Later ones are read after the
    others of their pass. `dataset`: index of the dataset.
    """

    generations: Sequence[Sequence[KnownFile]]
    text_unit: TxtRows
    num_lanes: int
    seed: int
    shuffle: bool
    dataset: int

    def shards(self, lane: int, nth: int) -> list[tuple[str, Shard]]:
        """Return file and shard of each part of a pass."""
        out: list[tuple[str, Shard]] = []
        for number, (files, every) in enumerate(zip(self.generations, self._shards, strict=True)):
            dealt = range(len(every))
            if self.shuffle:
                dealt = shuffled(len(every), self.seed, 3, self.dataset, number).tolist()
            # Example: 5 shards, 2 lanes, without shuffling. Lane 0 has shards 0, 2, 4 and lane 1 has 1, 3. The
            # assignment does not change between passes, so each lane reads each of its rows once per pass.
            own = [every[index] for index in dealt[lane :: self.num_lanes]]
            if self.shuffle:
                own = [own[i] for i in shuffled(len(own), self.seed, 4, self.dataset, number, lane, nth).tolist()]
            out += [(files[shard.span.file].name, shard) for shard in own]
        return out

    @property
    def num_shards(self) -> int:
        """Shards of all lanes."""
        return sum(map(len, self._shards))

    @cached_property
    def _shards(self) -> list[list[Shard]]:
        return [plan_shards(files, self.text_unit, self.num_lanes) for files in self.generations]


class LaneReader:
    """Reads one lane. Not thread-safe."""

    def __init__(self, source: StreamSource | PreparedSource, order: LaneOrder, lane: int):
        self.source, self.order, self.lane = source, order, lane
        self._open: tuple[Place, Iterator[NumberedRow]] | None = None
        self._pass: tuple[int, list[tuple[str, Shard]]] | None = None

    def read(self, at: Place, most: int, *, exactly: int | None = None) -> Chunk:
        """Read the next rows from `at` on, at least one and at most `most`, all of one pass.

        `exactly`: the number of rows that an earlier call returned, which the files that exist now do not change.
        Raises DataError if a pass has no rows, and for storage that cannot be read.
        """
        nth, index, number = at
        chunk, size, passes = Chunk(at), 0, 0
        while len(chunk.rows) < (most if exactly is None else exactly) and size < MOST_BYTES:
            shards = self._shards(nth)
            # The end of a pass. A block never crosses it, so the rows of a block are of one pass.
            if index == len(shards):
                if chunk.rows:
                    break
                if passes == 1 or (number == 0 and not shards):
                    raise self._no_rows()
                nth, index, number, passes = nth + 1, 0, 0, passes + 1
                continue
            found = self._next((nth, index, number))
            name, shard = shards[index]
            if found is None:
                index, number = index + 1, 0
                continue
            line, row = found
            number += 1
            self._moved((nth, index, number))
            if is_damaged(row):
                chunk.damaged.append(f"{place_of(name, shard)}: {row.message}")
                # The rest of a damaged shard is skipped, because rows after the damage have no known boundary.
                index, number, self._open = index + 1, 0, None
                continue
            chunk.add(place_of(name, shard), line, row)
            size += _size(row)
        chunk.end = (nth, index, number)
        return chunk

    def _shards(self, nth: int) -> list[tuple[str, Shard]]:
        if self._pass is None or self._pass[0] != nth:
            self._pass = nth, self.order.shards(self.lane, nth)
        return self._pass[1]

    def _next(self, at: Place) -> NumberedRow | None:
        """Return the row at a place, None after the last of a shard. A remote file that fails is opened again."""
        name, shard = self._shards(at[0])[at[1]]
        for attempt in itertools.count(1):
            try:
                if self._open is None or self._open[0] != at:
                    rows = self.source.rows_of(name, shard)
                    # Reading from a place skips the rows before it. In sequence, the open iterator is already there.
                    self._open = at, itertools.islice(rows, at[2], None)
                found = next(self._open[1], None)
            except DataError as error:
                if error.code != DAMAGED:
                    raise
                found, failure = (0, RowError(DAMAGED, error.message)), None
            except Exception as error:  # each storage library has its own exceptions
                found, failure = None, error
            else:
                failure = None
            ends_early = found is not None and is_damaged(found[1])
            if failure is None and not (ends_early and self.source.is_remote and attempt < _ATTEMPTS):
                return found
            self._open = None
            if failure is not None and not self.source.is_remote:
                raise failure
            if failure is not None and attempt >= _ATTEMPTS:
                raise unreadable(name, failure) from failure
            warn("server_rejected", "%s cannot be read, and is opened again: %s", name, failure or found)
            # Waits of 2 and 4 seconds before the second and third attempt.
            time.sleep(_PAUSE * attempt)
        raise AssertionError

    def _moved(self, at: Place) -> None:
        assert self._open is not None
        self._open = at, self._open[1]

    def _no_rows(self) -> DataError:
        return DataError(
            f"lane {self.lane} of {self.order.num_lanes} of {self.source.name} has no rows",
            code="not_enough_rows",
            keys=("data.streaming.lanes",),
            fix="data.streaming=null",
        )


def _size(value: object) -> int:
    """Return about the number of characters of a row."""
    match value:
        case Encoded():
            return 4 * len(value.ids)
        case str():
            return len(value)
        case dict():
            return sum(map(_size, value.values()))
        case list() | tuple():
            return sum(map(_size, value))
    return 8
