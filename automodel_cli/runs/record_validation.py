"""Validate `run.json`, which may be edited or written by another version."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

from automodel_cli.config.plain_text import visible

_Read = Callable[[object], object]
"""Returns the value as it may be used. Raises `_Invalid`."""


class _Invalid(Exception):
    """The value has a wrong type or range."""


def record(content: object) -> dict[str, Any]:
    """Return the record without entries of a wrong type. {} if it is not a record."""
    try:
        fields = _fields(content, _RECORD)
    except _Invalid:
        return {}
    return fields if "attempts" in fields else {}


def _valid(read: _Read, value: object) -> list[object]:
    """Return the value in a list, or an empty list if it is invalid."""
    try:
        return [read(value)]
    except _Invalid:
        return []


def _or_none(read: _Read) -> _Read:
    return lambda value: None if value is None else read(value)


def _text(value: object) -> str:
    match value:
        case str():
            return visible(value)
    raise _Invalid


def _count(value: object) -> int:
    match value:
        case bool():
            raise _Invalid
        case int() if abs(value) < 2**53:
            return value
    raise _Invalid


def _number(value: object) -> float:
    match value:
        case bool():
            raise _Invalid
        case int() | float() if abs(value) < 1e300:
            return value
    raise _Invalid


def _moment(value: object) -> str:
    match value:
        case str():
            try:
                if datetime.fromisoformat(value).tzinfo is not None:
                    return value
            except ValueError:
                pass
    raise _Invalid


def _mapping(read: _Read) -> _Read:
    def inner(value: object) -> dict[str, object]:
        match value:
            case dict():
                return {visible(str(name)): kept for name, item in value.items() for kept in _valid(read, item)}
        raise _Invalid

    return inner


def _list(read: _Read) -> _Read:
    def inner(value: object) -> list[object]:
        match value:
            case list():
                return [kept for item in value for kept in _valid(read, item)]
        raise _Invalid

    return inner


def _entry(shape: dict[str, _Read], *required: str) -> Callable[[object], dict[str, Any]]:
    """Return an entry with these fields only, or nothing if a required one is missing."""

    def inner(value: object) -> dict[str, object]:
        fields = _fields(value, shape)
        if any(name not in fields for name in required):
            raise _Invalid
        return {name: item for name, item in fields.items() if name in shape}

    return inner


def _fields(value: object, shape: dict[str, _Read]) -> dict[str, Any]:
    """Return the entries with correct types, and all that are not in the schema."""
    match value:
        case dict():
            reads = {name: shape.get(name, lambda item: item) for name in value}
            return {name: kept for name, item in value.items() for kept in _valid(reads[name], item)}
    raise _Invalid


def _content(value: object) -> list[str]:
    """A pair of a dataset's name and its hash."""
    match value:
        case [str(name), str(digest)]:
            return [visible(name), visible(digest)]
    raise _Invalid


def _dataset(value: object) -> object:
    dataset = _entry(_DATASET, "name", "text")(value)
    match dataset:
        case {"counts": [_, *_] as counts}:
            if len(dataset.get("edges", ())) != len(counts) + 1:
                raise _Invalid
    return dataset


def _attempt(value: object) -> dict[str, object]:
    return {"began": "", "state": "", "host": "", **_fields(value, _ATTEMPT)}


_DATASET: dict[str, _Read] = {
    "name": _text,
    "text": _text,
    "edges": _list(_number),
    "counts": _list(_count),
    "trained": _or_none(_number),
    "fill": _or_none(_number),
}
_SAMPLE: dict[str, _Read] = {
    "prompt": _text,
    "after": _text,
    "before": _or_none(_text),
    "expected": _or_none(_text),
    "pictures": _list(_text),
}
_ATTEMPT: dict[str, _Read] = {
    "began": _moment,
    "ended": _or_none(_moment),
    "state": _text,
    "first_step": _count,
    "host": _text,
    "process": _count,
    "command": _text,
    "code": _mapping(_text),
    "environment": _mapping(_text),
    "error": _text,
    "error_code": _text,
}
_RECORD: dict[str, _Read] = {
    "command": _text,
    "recipe": _text,
    "num_steps": _count,
    "about": _mapping(_text),
    "data": lambda value: _fields(value, {"contents": _list(_content), "statistics": _list(_dataset)}),
    "numbers": _mapping(_text),
    "samples": _list(_entry(_SAMPLE, "prompt", "after")),
    "layout": _mapping(_count),
    "attempts": _list(_attempt),
}
