"""Validate `run.json`, which may be edited or written by another version."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import datetime
from typing import Any

from automodel_cli.config.plain_text import visible

_NONE = object()
_Read = Callable[[Any], Any]
"""Returns the value as it may be used, or `_NONE`."""


def record(content: Any) -> dict[str, Any]:
    """Return the record without entries of a wrong type. {} if it is not a record."""
    fields = _fields(content, _RECORD)
    return {} if fields is _NONE or "attempts" not in fields else fields


def _text(value: object) -> object:
    return visible(value) if isinstance(value, str) else _NONE


def _text_or_none(value: object) -> object:
    return None if value is None else _text(value)


def _count(value: object) -> object:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else _NONE


def _number(value: Any) -> object:
    known = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return value if known and math.isfinite(value) else _NONE


def _number_or_none(value: object) -> object:
    return None if value is None else _number(value)


def _moment(value: Any) -> object:
    try:
        return value if datetime.fromisoformat(value).tzinfo is not None else _NONE
    except (TypeError, ValueError):
        return _NONE


def _mapping(read: _Read) -> _Read:
    def inner(value: Any) -> Any:
        if not isinstance(value, dict):
            return _NONE
        pairs = ((visible(str(name)), read(item)) for name, item in value.items())
        return {name: item for name, item in pairs if item is not _NONE}

    return inner


def _list(read: _Read) -> _Read:
    def inner(value: Any) -> Any:
        return [item for item in map(read, value) if item is not _NONE] if isinstance(value, list) else _NONE

    return inner


def _entry(shape: dict[str, _Read], *required: str) -> _Read:
    """Return an entry with these fields only, or nothing if a required one is missing."""

    def inner(value: Any) -> Any:
        fields = _fields(value, shape)
        if fields is _NONE or any(name not in fields for name in required):
            return _NONE
        return {name: item for name, item in fields.items() if name in shape}

    return inner


def _fields(value: object, shape: dict[str, _Read]) -> Any:
    """Return the entries with correct types, and all that are not in the schema."""
    if not isinstance(value, dict):
        return _NONE
    pairs = ((name, shape[name](item) if name in shape else item) for name, item in value.items())
    return {name: item for name, item in pairs if item is not _NONE}


def _content(value: Any) -> Any:
    """A pair of a dataset's name and its hash."""
    is_pair = isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value)
    return [visible(part) for part in value] if is_pair else _NONE


def _dataset(value: object) -> object:
    dataset = _entry(_DATASET, "name", "text")(value)
    if dataset is not _NONE and dataset.get("counts") and len(dataset.get("edges", ())) != len(dataset["counts"]) + 1:
        return _NONE
    return dataset


def _attempt(value: Any) -> object:
    fields = _fields(value, _ATTEMPT)
    return _NONE if fields is _NONE else {"began": "", "state": "", "host": "", **fields}


_DATASET: dict[str, _Read] = {
    "name": _text,
    "text": _text,
    "edges": _list(_number),
    "counts": _list(_count),
    "trained": _number_or_none,
    "fill": _number_or_none,
}
_SAMPLE: dict[str, _Read] = {
    "prompt": _text,
    "after": _text,
    "before": _text_or_none,
    "expected": _text_or_none,
    "pictures": _list(_text),
}
_ATTEMPT: dict[str, _Read] = {
    "began": _moment,
    "ended": lambda value: None if value is None else _moment(value),
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
