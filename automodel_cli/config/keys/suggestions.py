"""Suggestions for unknown keys: the most similar known key. Corrections are never applied silently."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Collection
from typing import NamedTuple

from automodel_cli.config.diagnostics import format_value
from automodel_cli.config.fix_syntax import override
from automodel_cli.config.keys import foreign as foreign_keys
from automodel_cli.config.keys.renamed import renamed


class Suggestion(NamedTuple):
    """`fix` is `key=value`, or None if only the user can choose the value. `note` describes the difference."""

    fix: str | None
    note: str = ""


def suggest(key: str, value: object, known: Collection[str]) -> Suggestion | None:
    """Return the first match: a renamed key, another tool's name (exact), the same leaf in another section, a close
    path, a close leaf."""
    leaf = key.rpartition(".")[2]
    new = renamed(key)
    if new is not None and new in known:
        return _set(new, value)
    row = foreign_keys.lookup(key)
    if row is not None and row.key in known:
        return _translated(row, value)
    same = [k for k in known if k.rpartition(".")[2] == leaf]
    if same:
        return _set(_closest(key, same), value)
    values = [k for k in known if not any(other.startswith(k + ".") for other in known)]  # no sections
    leaves: dict[str, list[str]] = {}
    for k in values:
        leaves.setdefault(k.rpartition(".")[2], []).append(k)
    section = key.rpartition(".")[0]
    typos = {name: _edits(leaf, name) for name in leaves if _is_typo(leaf, name)}
    here = {name: edits for name, edits in typos.items() if any(k.rpartition(".")[0] == section for k in leaves[name])}
    best = here or typos
    return _set(_closest(key, leaves[min(best, key=best.__getitem__)]), value) if best else None


def _is_typo(given: str, known: str) -> bool:
    """Return whether `given` may be a misspelling of `known`: one edit, or two in a long name with the same beginning.
    With more edits, other words would match: `precision` and `revision`, `use_dora` and `use_rslora`."""
    edits = _edits(given, known)
    shorter = min(len(given), len(known))
    return (edits == 1 and shorter > 2) or (edits == 2 and shorter > 6 and given[0] == known[0])


def _edits(given: str, known: str) -> int:
    """The least number of letters to insert, remove, replace or swap with a neighbor (optimal string alignment)."""
    before: list[int] = []
    last = list(range(len(known) + 1))
    for i, a in enumerate(given, 1):
        row = [i]
        for j, b in enumerate(known, 1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a != b)))
            if i > 1 and j > 1 and a == known[j - 2] and given[i - 2] == b:
                row[j] = min(row[j], before[j - 2] + 1)
        before, last = last, row
    return last[-1]


def _translated(row: foreign_keys.Foreign, value: object) -> Suggestion:
    """A value of theirs as an override of ours."""
    if "=" in row.ours:
        return Suggestion(row.ours, row.note)
    known = row.values.get(format_value(value).lower())
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
    """Suggest `key=value`. Sections and null are not carried over."""
    if value is None or isinstance(value, dict):
        return Suggestion(None, f"{key} here")
    return Suggestion(set_key(key, value))


def set_key(key: str, value: object) -> str:
    """Return `key=value` quoted for a shell. Of sections, only the empty one has a spelling."""
    text = format_value(value, limit=1000)
    match value:
        case list():
            return shlex.quote(f"{key}={text.replace(', ', ',')}")
        case str():
            return override(key, text)
    return f"{key}={text}"
