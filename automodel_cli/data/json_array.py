"""Read the objects of a JSON array one after another, in constant memory."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import IO, Any

from automodel_cli.data.json_reader import (
    MAX_ROW,
    SURROGATE,
    NumberedRow,
    Row,
    check_value,
    long_number,
    not_an_object,
    too_deep,
    too_long,
)
from automodel_cli.data.row_errors import DAMAGED, RowError

BLOCK = 1 << 20
CUT_TAIL = 16
"""A value cut off by the end of a block is noticed at most this many characters before it, but for strings."""

_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|["\[\]{}]', re.DOTALL)
_NUMBER = re.compile(r"[-+.\deE]+")
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


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
        self.has_bad_bytes = not self.text.isascii() and bool(SURROGATE.search(self.text))
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
                return too_deep(self._skip())
            except ValueError:
                return long_number(self._skip())
            else:
                if end < len(self.text) or isinstance(value, dict) or not self.more():
                    break  # a number at the end of the window may go on behind it
        source = self.text[self.at : end]
        self.at = end
        return self._checked(value, source)

    def _checked(self, value: Any, source: str) -> Row | RowError:
        if self.has_bad_bytes and (bad := SURROGATE.search(source)):
            raw = source.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
            return RowError("not_utf8", f"not UTF-8: byte 0x{ord(bad[0]) - 0xDC00:02x}", raw=raw)
        if not isinstance(value, dict):
            return not_an_object(value, source)
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
