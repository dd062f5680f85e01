"""Values of the environment that a config has read: no error message contains them."""

from __future__ import annotations

import os

_SHORTEST = 4
"""Minimum length of a secret in characters. Shorter texts occur in most messages."""
_names: set[str] = set()


def read_env(name: str, *default: object) -> str | None:
    """Return the value of `${oc.env:NAME}`: the variable, otherwise the default. Raises KeyError."""
    if name in os.environ:
        _names.add(name)
        return os.environ[name]
    if not default:
        raise KeyError(f"Environment variable '{name}' not found")
    return None if default[0] is None else str(default[0])


def hide(text: str) -> str:
    """Replace secret values in a text by their interpolations, also if an ellipsis truncates a value."""
    values = {os.environ.get(name, ""): f"${{oc.env:{name}}}" for name in _names}
    for value, name in sorted(values.items(), key=lambda item: -len(item[0])):
        if len(value) < _SHORTEST:
            break
        text = text.replace(value, name)
        for ellipsis in ("…", "..."):
            if value[:_SHORTEST] in text and ellipsis in text:
                text = _hide_cut(text, value, name, ellipsis)
    return text


def _hide_cut(text: str, value: str, name: str, ellipsis: str) -> str:
    parts = text.split(ellipsis)
    for i, part in enumerate(parts[:-1]):
        lengths = range(min(len(value), len(part)), _SHORTEST - 1, -1)
        cut = next((n for n in lengths if part.endswith(value[:n])), 0)
        parts[i] = part[: len(part) - cut] + name if cut else part
    return ellipsis.join(parts)
