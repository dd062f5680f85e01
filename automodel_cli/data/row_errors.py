"""Rows that cannot be used: how one is described, how many become one error, and how they are kept on disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from automodel_cli.config.errors import DataError

MAX_EXCERPT = 160
MAX_LINES_LISTED = 8
DAMAGED = "damaged_file"
"""The code of a place behind which a file cannot be read: dropping that row would drop all rows after it."""


class RowError(Exception):
    """One row cannot be used. `code` is the cause that rows are grouped by, `fix` a pasteable remedy of that cause."""

    def __init__(self, code: str, message: str, *, fix: str | None = None, raw: str | None = None):
        super().__init__(message)
        self.code, self.message, self.fix, self.raw = code, message, fix, raw

    def __reduce__(self) -> tuple[Any, ...]:
        """Keyword arguments survive the way back from a worker process."""
        return _row_error, (self.code, self.message, self.fix, self.raw)


def _row_error(code: str, message: str, fix: str | None, raw: str | None) -> RowError:
    return RowError(code, message, fix=fix, raw=raw)


def attempt(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The result, or the row's error as a value, so that the other rows of a batch go on."""
    try:
        return function(*args, **options)
    except RowError as error:
        return error


class TableRow(dict[str, Any]):
    """A row of a file with one schema for all: its nested objects hold every key that any row has, null where this row
    has none.
    """


def without_nulls(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row; of a table without the nested keys that are null, since chat templates test for a key's presence."""
    return _without_nulls(row) if isinstance(row, TableRow) else row


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


@dataclass(frozen=True)
class SourceRow:
    """Where a row of the data stands: file by number, line, and the row itself for the list of refused ones."""

    file: int
    line: int
    row: Any


@dataclass(frozen=True)
class Rejected:
    """A line of `rejected.jsonl`: where a row stands, why it was refused, and the row itself (text when unreadable)."""

    source: str
    line: int
    code: str
    message: str
    row: Any
    fix: str | None = None


def write_rejected(path: Path, rejected: Sequence[Rejected]) -> None:
    """One JSON object per line; what JSON cannot hold (dates, bytes of a parquet column) is written as text."""
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for item in rejected:
            file.write(json.dumps(asdict(item), ensure_ascii=False, default=str) + "\n")


def read_rejected(path: Path) -> list[Rejected]:
    """The rows that `write_rejected` kept."""
    with path.open(encoding="utf-8") as file:
        return [Rejected(**json.loads(line)) for line in file]


def rows_error(rejected: Sequence[Rejected], num_rows: int, *, fix: str) -> DataError:
    """One error for all refused rows: per cause the first in full with its text, the others counted and some lines
    named.
    """
    groups: dict[str, list[Rejected]] = {}
    for item in rejected:
        groups.setdefault(item.code, []).append(item)
    share = 100 * len(rejected) / max(1, num_rows)
    causes = "1 cause" if len(groups) == 1 else f"{len(groups)} causes"
    text = [f"{len(rejected):,} of {num_rows:,} rows cannot be used ({share:.1f}%, {causes})"]
    for items in sorted(groups.values(), key=len, reverse=True):
        first = items[0]
        text.append(f"  {first.source}:{first.line}: {first.message}")
        text.append(f"      {first.line} | {_excerpt(first.row)}")
        if first.fix:
            text.append(f"      fix {first.fix}")
        if len(items) > 1:
            names = ", ".join(f"{i.source}:{i.line}" for i in items[1 : 1 + MAX_LINES_LISTED])
            more = ", ..." if len(items) > 1 + MAX_LINES_LISTED else ""
            text.append(f"      {len(items) - 1:,} more like this: {names}{more}")
    return DataError("\n".join(text), code="bad_rows", fix=fix)


def _excerpt(row: Any) -> str:
    text = row if isinstance(row, str) else json.dumps(row, ensure_ascii=False, default=str)
    text = text.strip()
    return text if len(text) <= MAX_EXCERPT else f"{text[: MAX_EXCERPT - 4]} ..."


def refuse_damaged(rejected: Sequence[Rejected], num_rows: int) -> None:
    """Raise DataError where a file could not be read to its end: no policy for bad rows covers rows nobody saw."""
    damaged = [row for row in rejected if row.code == DAMAGED]
    if damaged:
        raise rows_error(damaged, num_rows, fix="repair the file: rows after the damage cannot be read")
