"""Did you mean: from an unknown key to the key that was probably meant. Nothing is ever corrected silently."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import NamedTuple

from automodel_cli.config import foreign
from automodel_cli.config.problems import show


class Suggestion(NamedTuple):
    """`fix` is `key=value` of ours; `note` says what differs in meaning."""

    fix: str
    note: str = ""


def suggest(key: str, value: object, known: Collection[str]) -> Suggestion | None:
    """The first that hits: same leaf in another section, another tool's name (exact), a close path, a close leaf."""
    leaf = key.rpartition(".")[2]
    same = [k for k in known if k.rpartition(".")[2] == leaf]
    if same:
        return Suggestion(_set(_closest(key, same), value))
    row = foreign.lookup(key)
    if row is not None and row.ours.partition("=")[0] in known:
        keep = not row.note and "=" not in row.ours
        return Suggestion(_set(row.ours, value) if keep else row.ours, row.note)
    values = [k for k in known if not any(other.startswith(k + ".") for other in known)]  # no sections
    near = difflib.get_close_matches(key, values, 1, 0.8)
    if near:
        return Suggestion(_set(near[0], value))
    leaves: dict[str, list[str]] = {}
    for k in values:
        leaves.setdefault(k.rpartition(".")[2], []).append(k)
    near = difflib.get_close_matches(leaf, leaves, 1, 0.7)
    return Suggestion(_set(_closest(key, leaves[near[0]]), value)) if near else None


def section(key: str, known: Collection[str]) -> str | None:
    """The section that a misspelt section name was meant for: a sibling with keys below it."""
    parent = key.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    sections = {k[len(prefix) :].partition(".")[0] for k in known if k.startswith(prefix) and "." in k[len(prefix) :]}
    near = difflib.get_close_matches(key[len(prefix) :], sections, 1, 0.75)
    return prefix + near[0] if near else None


def _closest(key: str, candidates: list[str]) -> str:
    return max(candidates, key=lambda k: difflib.SequenceMatcher(None, key, k).ratio())


def _set(key: str, value: object) -> str:
    """`key=value` where the value fits on a line, else the key alone."""
    return key if isinstance(value, (dict, list)) or value is None else f"{key}={show(value)}"
