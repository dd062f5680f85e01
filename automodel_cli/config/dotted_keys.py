"""Dotted keys of nested sections: `optimizer.betas.0`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator

_ABSENT = object()


def join(key: str, name: object) -> str:
    """Return the path of a key in a section. "" is the root."""
    return f"{key}.{name}" if key else str(name)


def value_at(tree: object, key: str, default: object = None) -> object:
    """Return the value of a dotted key, or `default` if it is absent. Numbers are indices of lists.

    Names may contain dots, as in `values_by_key`. Fields of dataclasses are names, too.
    """
    for name in itertools.accumulate(key.split("."), "{}.{}".format):
        value = _entry(tree, name)
        if value is not _ABSENT and name != key:
            value = value_at(value, key[len(name) + 1 :], _ABSENT)
        if value is not _ABSENT:
            return value
    return default


def _entry(tree: object, name: str) -> object:
    match tree:
        case list() | tuple() if name.isdecimal() and int(name) < len(tree):
            return tree[int(name)]
        case dict():
            return tree.get(name, _ABSENT)
    is_node = dataclasses.is_dataclass(tree) and not isinstance(tree, type)
    return vars(tree).get(name, _ABSENT) if is_node else _ABSENT


def values_by_key(tree: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted key and the value of every entry below `key`. Names may be numbers or contain dots."""
    entries: Iterable[tuple[object, object]] = ()
    match tree:
        case dict():
            entries = tree.items()
        case list():
            entries = enumerate(tree)
    for name, value in entries:
        yield join(key, name), value
        yield from values_by_key(value, join(key, name))
