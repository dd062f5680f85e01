"""Read JSON as numbered rows: one object per line, or one array of objects, which is read incrementally.

Values that tokenizers and templates cannot process become errors of their row: half of a surrogate pair, an integer of
thousands of digits, deep nesting. Memory is bounded by the largest row, not by the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from automodel_cli.config.errors import DataError
from automodel_cli.data.row_errors import RowError

Row = dict[str, Any]
NumberedRow = tuple[int, "Row | RowError"]

MAX_DEPTH = 100
"""Maximum nesting. Valid data is flatter, and a few times more would exhaust the stack of recursive functions."""
MAX_ROW = 256 << 20
"""Bytes of one row. A few MB of gzip unpack to a line of GiB."""

SURROGATE = re.compile("[\ud800-\udfff]")


def parse_json(text: str) -> object:
    """The value of a JSON text. Raises RowError (`not_json`, `too_deep`, `long_number`, `lone_surrogate`)."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError("not_json", f"not JSON: {error.msg} (column {error.colno})", raw=text) from error
    except RecursionError as error:
        raise too_deep(text) from error
    except ValueError as error:  # the interpreter's limit on the digits of an integer
        raise long_number(text) from error
    check_value(value, text)
    return value


def check_value(value: object, text: str) -> None:
    """Raise RowError for valid JSON that tokenizers cannot process. `text` is the JSON, to skip most traversals."""
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise too_deep(text)
    if "\\u" in text:
        surrogate = _lone_surrogate(value, "")
        if surrogate:
            place, half = surrogate
            raise RowError(
                "lone_surrogate",
                f"{place} contains half of a surrogate pair: \\u{ord(half):04x}",
                raw=text,
                fix="write the text as UTF-8, or both halves of the surrogate pair",
            )


def too_deep(text: str) -> RowError:
    return RowError("too_deep", f"lists and objects are nested more than {MAX_DEPTH} deep", raw=text)


def long_number(text: str) -> RowError:
    fix = "write the number as a string, in quotes"
    return RowError("long_number", "an integer has more than 4,300 digits", raw=text, fix=fix)


def _depth(value: object) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
    return depth


def _lone_surrogate(value: object, place: str) -> tuple[str, str] | None:
    """Return path and text of a lone surrogate. A pair of escaped halves is already one character here."""
    match value:
        case str():
            half = SURROGATE.search(value)
            return (place, half[0]) if half else None
        case dict():
            for key, item in value.items():
                at = SURROGATE.sub("?", key)
                result = _lone_surrogate(key, f"a key in {place or 'the row'}") or _lone_surrogate(
                    item, f"{place}.{at}" if place else at
                )
                if result:
                    return result
        case list():
            for index, item in enumerate(value):
                if result := _lone_surrogate(item, f"{place}[{index}]"):
                    return result
    return None


def read_lines(file: Iterable[bytes]) -> Iterator[NumberedRow]:
    """Yield one row per nonblank line, with its line number. An object over several lines is one rejected row."""
    lines = enumerate(bounded_lines(file), 1)
    held: tuple[int, bytes] | None = None
    while item := held or next(lines, None):
        held = None
        number, line = item
        text = line.removeprefix(b"\xef\xbb\xbf").strip()
        if text in (b"{", b"["):
            row, held = _spread(number, line, lines)
            yield number, row
        elif text:
            yield number, _parse_line(line)


def bounded_lines(file: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a file, none of which may be larger than memory. Raises DataError."""
    read = getattr(file, "readline", None)
    if read is None:
        yield from file
        return
    while line := read(MAX_ROW + 1):
        if len(line) > MAX_ROW:
            raise too_long(getattr(file, "name", "the file"))
        yield line


def too_long(name: object) -> DataError:
    """The error of a row that no memory holds."""
    return DataError(
        f"{name} has a row of more than {MAX_ROW >> 20} MiB",
        code="limit_exceeded",
        fix="write one object per line, or split the rows",
    )


def _spread(first: int, line: bytes, lines: Iterator[tuple[int, bytes]]) -> tuple[RowError, tuple[int, bytes] | None]:
    """Return the error of a value that is printed over several lines. It extends to the closing bracket in the same
    column. If there is none, the error includes the following line.
    """
    opening = line.removeprefix(b"\xef\xbb\xbf")
    indent = opening[: len(opening) - len(opening.lstrip())]
    closing = b"}" if opening.strip() == b"{" else b"]"
    head, last, rest = [opening], first, None
    for number, inner in lines:
        if inner.startswith(indent + b'{"') and inner.rstrip().endswith(b"}"):  # another row: this one never closed
            rest = (number, inner)
            break
        last = number
        if len(head) < 20:
            head.append(inner)
        if inner.startswith(indent + closing) and inner.strip().rstrip(b",") == closing:
            break
    what = "an object" if closing == b"}" else "an array"
    return RowError(
        "not_json",
        f"not JSON on one line: {what} spans lines {first:,} to {last:,}",
        raw=b"".join(head).decode("utf-8", "replace"),
        fix="write one object per line: jq -c . FILE > rows.jsonl"
        + (" (-c '.[]' for an array)" if closing == b"]" else ""),
    ), rest


def _parse_line(line: bytes) -> Row | RowError:
    try:
        text = line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        message = f"not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line"
        return RowError("not_utf8", message, raw=line.decode("utf-8", "replace"))
    try:
        row = parse_json(text)
    except RowError as error:
        return error
    return row if isinstance(row, dict) else not_an_object(row, text)


def not_an_object(row: Any, text: str) -> RowError:
    return RowError("not_an_object", f"the row is {_json_type(row)}, but must be an object with columns", raw=text)


def _json_type(value: object) -> str:
    names = {list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)
