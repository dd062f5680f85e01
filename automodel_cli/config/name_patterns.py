"""Lists of names and patterns. An entry without a match is rejected with the most similar name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import list_override, mapping_override

_SHOWN = 12


class NameList(NamedTuple):
    """Names in a config. `key` is dotted. `entries` is a list, or a mapping whose keys are the names. `rule` is the
    violated rule, for example "no linear layer's name ends in". `empty` is the value of the key if no entry remains.
    """

    key: str
    entries: Sequence[str] | Mapping[str, object]
    rule: str
    empty: str = "[]"


def check_entries(
    listed: NameList,
    matches: Callable[[str], bool],
    names: Collection[str],
    *,
    error: type[ConfigError] = ConfigError,
) -> None:
    """Raise `error` for the first entry for which `matches` is false.

    `names` are the valid names. In the fix, similar names replace unmatched entries, and entries without a similar
    name are removed.
    """
    wrong = [entry for entry in listed.entries if not matches(entry)]
    if not wrong:
        return
    known = sorted(set(names))
    meant = {entry: nearest(entry, known) for entry in wrong}
    have = ", ".join(known[:_SHOWN]) + (", ..." if len(known) > _SHOWN else "")
    near = "" if meant[wrong[0]] is None else f"; {meant[wrong[0]]} is near"
    raise error(
        f"{listed.key} names {wrong[0]!r}, which {listed.rule}: {have or 'there are none'}{near}",
        code="unknown_name",
        keys=(listed.key,),
        fix=_fix(listed, meant),
    )


def nearest(entry: str, names: Collection[str]) -> str | None:
    """The name that `entry` was probably meant as."""
    return next(iter(difflib.get_close_matches(entry, names, 1, 0.6)), None)


def endings(names: Iterable[str]) -> set[str]:
    """Return the last parts of dotted names."""
    return {name.rpartition(".")[2] for name in names}


def ends_in(name: str, ending: str) -> bool:
    """Return whether the last parts of a dotted name are those of `ending`."""
    return f".{name}".endswith(f".{ending}")


def _fix(listed: NameList, meant: Mapping[str, str | None]) -> str:
    kept = {name: entry for entry in listed.entries if (name := meant.get(entry, entry)) is not None}
    if not kept:
        return f"{listed.key}={listed.empty}"
    if isinstance(listed.entries, Mapping):
        values = {name: listed.entries[entry] for name, entry in kept.items()}
        plain = {name: value for name, value in values.items() if isinstance(value, (str, int, float))}
        fix = mapping_override(listed.key, plain) if len(plain) == len(values) else None
        return fix or f"{listed.key}={listed.empty}"  # objects, which no override spells
    return list_override(listed.key, kept)
