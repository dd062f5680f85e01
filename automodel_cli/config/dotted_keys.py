"""Dotted keys of nested sections: `optimizer.betas.0`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def join(key: str, name: object) -> str:
    """Return the path of a key in a section. "" is the root."""
    return f"{key}.{name}" if key else str(name)


def value_at(tree: object, key: str, default: object = None) -> object:
    """Return the value of a dotted key, or `default` if it is absent. Numbers are indices of lists."""
    for part in key.split("."):
        match tree:
            case list() if part.isdecimal() and int(part) < len(tree):
                tree = tree[int(part)]
            case dict() if part in tree:
                tree = tree[part]
            case _:
                return default
    return tree


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
