"""Rejected rows: errors of single rows, one error for all rejected rows, and `rejected.jsonl`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeGuard, TypeVar

from automodel_cli.config.errors import DataError

MAX_EXCERPT = 160
MAX_LINES_LISTED = 8
T = TypeVar("T")
U = TypeVar("U")
P = ParamSpec("P")
DAMAGED = "damaged_file"
"""Code of a file that is unreadable after this row. Skipping the row would skip all rows after it."""


class RowError(Exception):
    """A row cannot be used. Rows are grouped by `code`. `fix` is a pasteable remedy, `raw` the unparsed text, `file`
    the picture that cannot be read."""

    def __init__(
        self, code: str, message: str, *, fix: str | None = None, raw: str | None = None, file: str | None = None
    ):
        super().__init__(message)
        self.code, self.message, self.fix, self.raw, self.file = code, message, fix, raw, file

    def __reduce__(self) -> tuple[object, ...]:
        """Keep keyword arguments when a worker process sends the error."""
        return _row_error, (self.code, self.message, self.fix, self.raw, self.file)


def _row_error(code: str, message: str, fix: str | None, raw: str | None, file: str | None) -> RowError:
    return RowError(code, message, fix=fix, raw=raw, file=file)


def attempt(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> T | RowError:
    """Return the result or the RowError as a value, so that the other rows of a batch are processed."""
    try:
        return function(*args, **options)
    except RowError as error:
        return error


def unwrap(value: T | RowError) -> T:
    """Return a value that `attempt` returned. Raises it if it is an error."""
    if isinstance(value, RowError):
        raise value
    return value


def usable(values: Iterable[T | RowError]) -> list[T]:
    """Return the values that are no errors."""
    return [value for value in values if not isinstance(value, RowError)]


def attempt_each(function: Callable[[T], U], values: Iterable[T | RowError]) -> list[U | RowError]:
    """Apply a function to each value. Errors, earlier ones and those that it raises, are values at their place."""
    return [attempt(lambda value: function(unwrap(value)), value) for value in values]


def attempt_batch(function: Callable[[list[T]], Iterable[U]], values: Sequence[T | RowError]) -> list[U | RowError]:
    """Apply a function that needs the whole batch to the values that are no errors. Errors keep their place."""
    results = iter(function(usable(values)))
    return [value if isinstance(value, RowError) else next(results) for value in values]


class TableRow(dict[str, Any]):
    """A row of a file with a schema. Its nested objects contain the keys of all rows, with null for absent ones."""


def without_nulls(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the row. Nested null keys of a `TableRow` are removed, because templates test for presence of keys."""
    return _without_nulls(row) if isinstance(row, TableRow) else row


def _without_nulls(value: Any) -> Any:
    match value:
        case dict():
            return {key: _without_nulls(item) for key, item in value.items() if item is not None}
        case list():
            return [_without_nulls(item) for item in value]
    return value


@dataclass(frozen=True)
class SourceRow:
    """Origin of a row: index of the file, line, and the row itself for the list of rejected rows."""

    file: int
    line: int
    row: Any


@dataclass(frozen=True)
class Rejected:
    """A line of `rejected.jsonl`: origin, cause and contents of a row. Unreadable rows are text."""

    source: str
    line: int
    code: str
    message: str
    row: object
    fix: str | None = None


def write_rejected(path: Path, rejected: Sequence[Rejected]) -> None:
    """Write one JSON object per line. Values without a JSON type (dates, bytes) are written as text."""
    with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for item in rejected:
            file.write(json.dumps(asdict(item), ensure_ascii=False, default=str) + "\n")


def read_rejected(path: Path) -> list[Rejected]:
    """Read the file that `write_rejected` wrote."""
    with path.open(encoding="utf-8") as file:
        return [Rejected(**json.loads(line)) for line in file]


def rows_error(rejected: Sequence[Rejected], num_rows: int, *, fix: str) -> DataError:
    """Return one error for all rejected rows.

    For each cause it contains the first row with its message, the number of further rows, and some of their lines.
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


def _excerpt(row: object) -> str:
    text = row if isinstance(row, str) else json.dumps(row, ensure_ascii=False, default=str)
    text = text.strip()
    return text if len(text) <= MAX_EXCERPT else f"{text[: MAX_EXCERPT - 4]} ..."


def is_finite_number(value: object) -> TypeGuard[float]:
    """Return whether a value of a row is a number that a float holds, and not a boolean, infinite or NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_damaged(row: object) -> TypeGuard[RowError]:
    """Return whether the rows after this one could not be read."""
    return isinstance(row, RowError) and row.code == DAMAGED


def refuse_damaged(rejected: Sequence[Rejected], num_rows: int) -> None:
    """Raise DataError if a file could not be read to its end. `data.on_invalid_row` does not apply to unread rows."""
    damaged = [row for row in rejected if row.code == DAMAGED]
    if damaged:
        raise rows_error(damaged, num_rows, fix="repair the file: rows after the damage cannot be read")
