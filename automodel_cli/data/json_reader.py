"""Read JSON as numbered rows: one object per line, or one array of objects, which is read incrementally.

Values that tokenizers and templates cannot process become errors of their row: half of a surrogate pair, an integer of
thousands of digits, deep nesting. Memory is bounded by the largest row, not by the file.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator
from typing import IO, Any

from automodel_cli.config.errors import DataError
from automodel_cli.data.row_errors import DAMAGED, RowError

Row = dict[str, Any]
NumberedRow = tuple[int, "Row | RowError"]

MAX_DEPTH = 100
"""Maximum nesting. Valid data is flatter, and a few times more would exhaust the stack of recursive functions."""
MAX_ROW = 256 << 20
"""Bytes of one row. A few MB of gzip unpack to a line of GiB."""
BLOCK = 1 << 20
CUT_TAIL = 16
"""A value cut off by the end of a block is noticed at most this many characters before it, but for strings."""

_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|["\[\]{}]', re.DOTALL)
_NUMBER = re.compile(r"[-+.\deE]+")
_SURROGATE = re.compile("[\ud800-\udfff]")
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises RowError (`not_json`, `too_deep`, `long_number`, `lone_surrogate`)."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise RowError("not_json", f"not JSON: {error.msg} (column {error.colno})", raw=text) from error
    except RecursionError as error:
        raise _too_deep(text) from error
    except ValueError as error:  # the interpreter's limit on the digits of an integer
        raise _long_number(text) from error
    check_value(value, text)
    return value


def check_value(value: Any, text: str) -> None:
    """Raise RowError for valid JSON that tokenizers cannot process. `text` is the JSON, to skip most traversals."""
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise _too_deep(text)
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


def _too_deep(text: str) -> RowError:
    return RowError("too_deep", f"lists and objects are nested more than {MAX_DEPTH} deep", raw=text)


def _long_number(text: str) -> RowError:
    fix = "write the number as a string, in quotes"
    return RowError("long_number", "an integer has more than 4,300 digits", raw=text, fix=fix)


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level = [item for items in inner for item in items if isinstance(item, dict | list)]
    return depth


def _lone_surrogate(value: Any, place: str) -> tuple[str, str] | None:
    """Return path and text of a lone surrogate. A pair of escaped halves is already one character here."""
    if isinstance(value, str):
        half = _SURROGATE.search(value)
        return (place, half[0]) if half else None
    if isinstance(value, dict):
        for key, item in value.items():
            at = _SURROGATE.sub("?", key)
            result = _lone_surrogate(key, f"a key in {place or 'the row'}") or _lone_surrogate(
                item, f"{place}.{at}" if place else at
            )
            if result:
                return result
    if isinstance(value, list):
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
    return row if isinstance(row, dict) else _not_an_object(row, text)


def _not_an_object(row: Any, text: str) -> RowError:
    return RowError("not_an_object", f"the row is {_json_type(row)}, but must be an object with columns", raw=text)


def _json_type(value: Any) -> str:
    names = {list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def read_array(file: IO[bytes]) -> Iterator[NumberedRow]:
    """Yield the elements of one JSON array, numbered from 1. A syntax error yields a `DAMAGED` row and ends it."""
    window = _Window(file)
    number = 1
    try:
        window.take("[")
        more = window.next_character() != "]"
        while more:
            yield number, window.element()
            number += 1
            more = window.next_character() == ","
            if more:
                window.take(",")
        window.take("]", "Expecting ',' delimiter")
        window.take("", "Extra data")
    except RowError as error:
        yield number, error


class _Window:
    """The stretch of a long text that is in memory, and a place in it."""

    def __init__(self, file: IO[bytes]):
        self.file = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        self.text, self.at, self.ended = "", 0, False
        self.line, self.column = 1, 1
        self.has_bad_bytes = False

    def more(self) -> bool:
        """Drop the text behind the position and read at least as much as remains. False at the end of the text."""
        if self.ended:
            return False
        self.line, self.column = self._position(self.at)
        left = self.text[self.at :]
        if len(left) > MAX_ROW:
            raise too_long(getattr(self.file, "name", "the file"))
        block = self.file.read(max(BLOCK, len(left)))
        self.ended = not block
        self.text, self.at = left + block, 0
        self.has_bad_bytes = not self.text.isascii() and bool(_SURROGATE.search(self.text))
        return True

    def next_character(self) -> str:
        """Return the next character that is not white space without consuming it, or "" at the end of the text."""
        while True:
            match = _SPACE.match(self.text, self.at)
            assert match is not None, "the pattern matches nothing as well"
            self.at = match.end()
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def take(self, character: str, problem: str = "Expecting value") -> None:
        """Step over this character, or make sure of the end of the text if it is empty."""
        if self.next_character() != character:
            raise self._damaged(problem, self.at)
        self.at += len(character)

    def element(self) -> Row | RowError:
        """Return the next value. Raises RowError if the text is not valid JSON: the rest cannot be read then."""
        self.next_character()
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated") or error.pos > len(self.text) - CUT_TAIL
                if not (is_cut and self.more()):
                    raise self._damaged(error.msg, error.pos) from error
            except RecursionError:
                return _too_deep(self._skip())
            except ValueError:
                return _long_number(self._skip())
            else:
                if end < len(self.text) or isinstance(value, dict) or not self.more():
                    break  # a number at the end of the window may go on behind it
        source = self.text[self.at : end]
        self.at = end
        return self._checked(value, source)

    def _checked(self, value: Any, source: str) -> Row | RowError:
        if self.has_bad_bytes and (bad := _SURROGATE.search(source)):
            raw = source.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            return RowError("not_utf8", f"not UTF-8: byte 0x{ord(bad[0]) - 0xDC00:02x}", raw=raw)
        if not isinstance(value, dict):
            return _not_an_object(value, source)
        try:
            check_value(value, source)
        except RowError as error:
            return error
        return value

    def _skip(self) -> str:
        """Step over a list or object by its brackets, or over a number, and return its text."""
        while True:
            end = self._end_of_value()
            if end is not None and end < len(self.text):
                source = self.text[self.at : end]
                self.at = end
                return source
            if not self.more():
                raise self._damaged("the text ends within a value", len(self.text))

    def _end_of_value(self) -> int | None:
        if number := _NUMBER.match(self.text, self.at):
            return number.end()
        depth = 0
        for bracket in _BRACKETS.finditer(self.text, self.at):
            if bracket[0] == '"':  # the window ends within this string
                return None
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(bracket[0], 0)
            if depth == 0:
                return bracket.end()
        return None

    def _position(self, at: int) -> tuple[int, int]:
        newlines = self.text.count("\n", 0, at)
        column = at - self.text.rfind("\n", 0, at) if newlines else self.column + at
        return self.line + newlines, column

    def _damaged(self, problem: str, at: int) -> RowError:
        line, column = self._position(at)
        raw = self.text[self.at : self.at + 200].encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        return RowError(DAMAGED, f"not JSON: {problem} (line {line}, column {column})", raw=raw)
