"""Did you mean: from an unknown key to the key that was probably meant. Nothing is ever corrected silently."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Collection
from typing import NamedTuple

from automodel_cli.config import other_frameworks
from automodel_cli.config.problems import show


class Suggestion(NamedTuple):
    """`fix` is `key=value` of ours, None where only a person can choose the value; `note` says what differs."""

    fix: str | None
    note: str = ""


def suggest(key: str, value: object, known: Collection[str]) -> Suggestion | None:
    """The first that hits: another tool's name (exact), same leaf in another section, a close path, a close leaf."""
    leaf = key.rpartition(".")[2]
    row = other_frameworks.lookup(key)
    if row is not None and row.key in known:
        return _translated(row, value)
    same = [k for k in known if k.rpartition(".")[2] == leaf]
    if same:
        return _set(_closest(key, same), value)
    values = [k for k in known if not any(other.startswith(k + ".") for other in known)]  # no sections
    near = [k for k in difflib.get_close_matches(key, values, 3, 0.8) if _may_be_typo(leaf, k.rpartition(".")[2])]
    if near:
        return _set(near[0], value)
    leaves: dict[str, list[str]] = {}
    for k in values:
        leaves.setdefault(k.rpartition(".")[2], []).append(k)
    near = [name for name in difflib.get_close_matches(leaf, leaves, 3, 0.7) if _may_be_typo(leaf, name)]
    return _set(_closest(key, leaves[near[0]]), value) if near else None


def _may_be_typo(given: str, known: str) -> bool:
    """Not where a word stands for another one: `value_coef` is spelt like `kl_coef` and is something else."""
    pairs = list(zip(given.split("_"), known.split("_"), strict=False))
    same_count = given.count("_") == known.count("_") > 0
    return not same_count or all(difflib.SequenceMatcher(None, *pair).ratio() >= 0.5 for pair in pairs)


def _translated(row: other_frameworks.Foreign, value: object) -> Suggestion:
    """A value of theirs as an override of ours."""
    if "=" in row.ours:
        return Suggestion(row.ours, row.note)
    known = row.values.get(show(value).lower())
    if known is not None:
        return Suggestion(known)
    if row.is_list and isinstance(value, str) and "," in value:
        value = [item.strip() for item in value.split(",")]
    if row.other_value:
        return Suggestion(None, row.note)
    return Suggestion(_set(row.key, value).fix, row.note)


def section(key: str, known: Collection[str]) -> str | None:
    """The section that a misspelt section name was meant for: a sibling with keys below it."""
    parent = key.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    sections = {k[len(prefix) :].partition(".")[0] for k in known if k.startswith(prefix) and "." in k[len(prefix) :]}
    near = difflib.get_close_matches(key[len(prefix) :], sections, 1, 0.75)
    return prefix + near[0] if near else None


def _closest(key: str, candidates: list[str]) -> str:
    return max(candidates, key=lambda k: difflib.SequenceMatcher(None, key, k).ratio())


def _set(key: str, value: object) -> Suggestion:
    """`key=value` as a shell takes it; a section or nothing is no value to carry over."""
    if isinstance(value, dict) or value is None:
        return Suggestion(None, f"{key} here")
    text = show(value, limit=1000)
    plain = all(c.isalnum() or c in "._/+-" for c in text)
    if isinstance(value, list):
        return Suggestion(shlex.quote(f"{key}={text.replace(', ', ',')}"))
    if isinstance(value, str) and not plain:
        quoted = text.replace("\\", "\\\\").replace('"', '\\"')
        return Suggestion(shlex.quote(f'{key}="{quoted}"'))
    return Suggestion(f"{key}={text}")
