"""Strings of JSON values: nested lists and objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def strings_in(value: object) -> Iterator[str]:
    """Yield every string of a value, including the keys of objects, which precede their values."""
    match value:
        case str():
            yield value
        case dict():
            for item in (*value.keys(), *value.values()):
                yield from strings_in(item)
        case list() | tuple():
            for item in value:
                yield from strings_in(item)


def map_strings(function: Callable[[str], str], value: Any) -> Any:
    """Return a copy in which every string, including keys, is replaced by the result of the function."""
    match value:
        case str():
            return function(value)
        case dict():
            return {map_strings(function, key): map_strings(function, item) for key, item in value.items()}
        case list():
            return [map_strings(function, item) for item in value]
    return value
