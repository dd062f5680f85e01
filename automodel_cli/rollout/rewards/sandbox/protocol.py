"""Protocol between the test process and the process of the code: JSON lines, never pickle.

Plain data (numbers, texts, lists, dicts, sets, dates, ...) is passed by value, as its base type. For example, a
subclass of `int` with a custom `__eq__` arrives as `int`. Other objects stay in their process and are referenced by
number.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import json
import os
from collections.abc import Callable
from typing import Any

_MAX_BYTES = 16 * 2**20
_SAFE_INT = 2**63


class Gone(Exception):
    """The other process has ended, or does not speak this language."""


class Peer:
    """One end of the link. A subclass implements `answer`, and `hold` and `load` for objects that are not passed by
    value."""

    def __init__(self, descriptor: int):
        self._in = os.fdopen(descriptor, "rb")
        self._descriptor = descriptor

    def ask(self, op: str, *arguments: object, **keywords: object) -> dict[str, Any]:
        """Send a request and return the reply. Requests of the other side are answered in the meantime."""
        self.send({"op": op, "args": [self.encode(a) for a in arguments], "kwargs": self.encode(keywords)})
        while "op" in (message := self.receive()):
            self.send(self.answer(message))
        return message

    def serve(self) -> None:
        """Answer questions until the other side is gone."""
        while True:
            self.send(self.answer(self.receive()))

    def answer(self, message: dict[str, object]) -> dict[str, object]:
        raise NotImplementedError

    def hold(self, value: object) -> dict[str, object]:
        """Return the reference of an object that stays here. Raises TypeError for objects that must not be shared."""
        raise NotImplementedError

    def load(self, kind: str, number: int) -> object:
        """Return the local object of a `hold` of the other side."""
        raise NotImplementedError

    def send(self, message: dict[str, object]) -> None:
        data = json.dumps(message).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as error:
            raise Gone from error

    def receive(self) -> dict[str, object]:
        try:
            line = self._in.readline(_MAX_BYTES)
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError, RecursionError) as error:
            raise Gone from error
        if not isinstance(message, dict):
            raise Gone
        return message

    def encode(self, value: object) -> Any:
        """JSON of a value. Raises RecursionError for one that contains itself."""
        match value:
            case None | bool() | float() | str():
                return value
            case int():
                return value if -_SAFE_INT < value < _SAFE_INT else {"k": "int", "v": hex(value)}
        for kind, (types, parts, _) in _KINDS.items():
            if isinstance(value, types):
                encoded = parts(value)
                return {"k": kind, "v": [self.encode(part) for part in encoded]}
        return self.hold(value)

    def decode(self, data: Any) -> Any:
        """Decode a value. Raises Gone for data that `encode` cannot produce."""
        try:
            match data:
                case {"k": "int", "v": content}:
                    return int(content, 16)
                case {"k": kind, "v": content} if kind in _KINDS:
                    return _KINDS[kind][2]([self.decode(part) for part in content])
                case {"k": kind, "v": content}:
                    return self.load(str(kind), int(content))
                case None | bool() | int() | float() | str():
                    return data
        except (KeyError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise Gone from error
        raise Gone


_Parts = Callable[[Any], Any]
_Make = Callable[[list[Any]], Any]

_KINDS: dict[str, tuple[Any, _Parts, _Make]] = {
    "list": (list, list.copy, list),
    "tuple": (tuple, tuple.__iter__, tuple),
    "dict": (dict, dict.items, dict),
    "set": (set, set.__iter__, set),
    "frozenset": (frozenset, frozenset.__iter__, frozenset),
    "bytes": (bytes, lambda v: [bytes.hex(v)], lambda p: bytes.fromhex(p[0])),
    "bytearray": (bytearray, lambda v: [bytearray.hex(v)], lambda p: bytearray.fromhex(p[0])),
    "complex": (complex, lambda v: [v.real, v.imag], lambda p: complex(*p)),
    "range": (range, lambda v: [v.start, v.stop, v.step], lambda p: range(*p)),
    "deque": (
        collections.deque,
        lambda v: [v.maxlen, list(collections.deque.__iter__(v))],
        lambda p: collections.deque(p[1], p[0]),
    ),
    "decimal": (decimal.Decimal, lambda v: [decimal.Decimal.__str__(v)], lambda p: decimal.Decimal(p[0])),
    "fraction": (fractions.Fraction, lambda v: [v.numerator, v.denominator], lambda p: fractions.Fraction(*p)),
    "datetime": (
        datetime.datetime,
        lambda v: [datetime.datetime.isoformat(v)],
        lambda p: datetime.datetime.fromisoformat(p[0]),
    ),
    "date": (datetime.date, lambda v: [datetime.date.isoformat(v)], lambda p: datetime.date.fromisoformat(p[0])),
    "time": (datetime.time, lambda v: [datetime.time.isoformat(v)], lambda p: datetime.time.fromisoformat(p[0])),
    "timedelta": (
        datetime.timedelta,
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda p: datetime.timedelta(*p),
    ),
}
"""Kind -> types, parts of a value (which are encoded too), and a function from parts to the value."""
