"""Parts of files that can be read on their own, so that several processes share the rows of a dataset.

Files with one row per line (`.jsonl`, and `.txt` with `text_unit=line`) are divided at line breaks. All others are read
as a whole.

Example: files of 5, 70 and 10 MiB with 32 MiB a part give the parts `[0: 5 MiB, 1: 0-32 MiB]`, `[1: 32-64 MiB]` and
`[1: 64-70 MiB, 2: 10 MiB]`.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from automodel_cli.data.json_reader import NumberedRow, bounded_lines, read_lines
from automodel_cli.data.source_config import TxtRows
from automodel_cli.data.sources.file_readers import read_file, refuse_wide_characters
from automodel_cli.data.sources.text_reader import read_text

SHARD_BYTES = 32 << 20
"""Bytes of source files in one shard: some seconds of work, of which a killed process loses at most one."""


@dataclass(frozen=True)
class Span:
    """The rows of a file whose first byte is in `begin ... end - 1`. `end` None: the complete file, read as usual. Of a
    hub dataset: the rows `begin ... end - 1`."""

    file: int
    begin: int = 0
    end: int | None = None


def plan_shards(paths: Sequence[Path], text_unit: TxtRows) -> list[list[Span]]:
    """Return the spans of each shard of about `SHARD_BYTES`. They depend on the files only. A file occurs at most once
    in a shard."""
    shards: list[list[Span]] = [[]]
    size, num_bytes = 0, SHARD_BYTES
    for number, path in enumerate(paths):
        total = path.stat().st_size
        step = num_bytes if is_divisible(path, text_unit) else max(1, total)
        for begin in range(0, max(1, total), step):
            if size >= num_bytes:
                shards.append([])
                size = 0
            end = min(begin + step, total)
            shards[-1].append(Span(number) if step >= total else Span(number, begin, end))
            size += end - begin
    return shards


def plan_rows(num_rows: int, num_bytes: int) -> list[list[Span]]:
    """Return ranges of the rows of a dataset of about `SHARD_BYTES`."""
    step = max(1, num_rows * SHARD_BYTES // max(1, num_bytes))
    return [[Span(0, begin, min(begin + step, num_rows))] for begin in range(0, num_rows, step)] or [[]]


def span_bytes(paths: Sequence[Path], spans: Sequence[Span]) -> int:
    """Return the number of bytes of the spans."""
    return sum(paths[s.file].stat().st_size if s.end is None else s.end - s.begin for s in spans)


def read_span(path: Path, text_unit: TxtRows, span: Span) -> Iterator[NumberedRow]:
    """Yield the rows of the span, numbered from its first line."""
    if span.end is None:
        return read_file(path, text_unit)
    if span.begin == 0:
        refuse_wide_characters(path)
    return _rows_of_lines(path, text_unit, span)


def _rows_of_lines(path: Path, text_unit: TxtRows, span: Span) -> Iterator[NumberedRow]:
    assert span.end is not None
    with path.open("rb") as file:
        lines: Any = _SpanLines(file, str(path), _line_start(file, span.begin), span.end)
        yield from read_text(lines, path, text_unit) if path.name.endswith(".txt") else read_lines(lines)


class _SpanLines:
    """The lines that begin before the byte `end` of a file, from the byte `begin` on, as a file to read lines from."""

    def __init__(self, file: IO[bytes], name: str, begin: int, end: int):
        self.name, self._file, self._place, self._end = name, file, begin, end
        self._inside = False
        file.seek(begin)

    def readline(self, limit: int = -1) -> bytes:
        if self._place >= self._end and not self._inside:
            return b""
        line = self._file.readline(limit)
        self._place += len(line)
        # `limit` may end a read inside a line. The rest belongs to this span, even if it lies behind `end`.
        self._inside = not line.endswith(b"\n") and bool(line)
        return line

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.readline, b"")


def num_lines(path: Path, span: Span) -> int:
    """Return the number of line breaks in the span, by which the lines of the next one are counted on."""
    return 0 if span.end is None else _lines_of(path, span).count(b"\n")


def is_divisible(path: Path, text_unit: TxtRows) -> bool:
    """Return whether each line of the file is a row."""
    return path.name.endswith(".jsonl") or (path.name.endswith(".txt") and text_unit == "line")


def _lines_of(path: Path, span: Span) -> bytes:
    """Return the lines that begin in the span."""
    assert span.end is not None
    with path.open("rb") as file:
        begin = _line_start(file, span.begin)
        end = _line_start(file, span.end)
        file.seek(begin)
        return file.read(end - begin)


def _line_start(file: io.BufferedReader, position: int) -> int:
    """Return the position of the first line that begins at `position` or later."""
    if position == 0:
        return 0
    # From one byte before: if it is a line break, the line at `position` itself is the first one. Example: "ab\ncd\n"
    # and a boundary at 3 give "cd" to the second span. A boundary at 2 does too, because "ab" began before it.
    file.seek(position - 1)
    for line in bounded_lines(file):
        return position - 1 + len(line)
    return position
