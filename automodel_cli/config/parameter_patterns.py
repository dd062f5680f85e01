"""Patterns that select parameters by name, for `train.freeze`, `train.trainable` and `optimizer.groups`. Torch-free."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import NamedTuple

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import list_override
from automodel_cli.config.name_patterns import NameList, check_entries

_REGEX = "re:"


class Selection(NamedTuple):
    """Which parameters are trained: those that match `trainable` (all, if it is empty) and not `freeze`."""

    freeze: tuple[str, ...] = ()
    trainable: tuple[str, ...] = ()


EVERYTHING = Selection()


def matches(pattern: str, name: str) -> bool:
    """Return whether a pattern selects the parameter `name`.

    `re:REGEX` must match from the start of the name, as `re.match`. Any other pattern is a sequence of consecutive
    parts of the name between dots, each with the wildcards of a shell. Example: `layers.*.mlp` selects
    `model.layers.3.mlp.up_proj.weight`.
    """
    if pattern.startswith(_REGEX):
        return re.match(pattern.removeprefix(_REGEX), name) is not None
    wanted, parts = pattern.split("."), name.split(".")
    starts = range(len(parts) - len(wanted) + 1)
    return any(all(map(fnmatchcase, parts[start:], wanted)) for start in starts)


def any_matches(patterns: Iterable[str], name: str) -> bool:
    """Return whether one of the patterns selects the parameter."""
    return any(matches(pattern, name) for pattern in patterns)


def check_syntax(key: str, patterns: Sequence[str]) -> None:
    """Raise ConfigError for an empty pattern or an invalid regular expression. `key` is dotted."""
    for pattern in patterns:
        reason = None if pattern.strip(".") else "it is empty"
        if pattern.startswith(_REGEX):
            try:
                re.compile(pattern.removeprefix(_REGEX))
            except re.error as error:
                reason = f"the regular expression is invalid: {error}"
        if reason is not None:
            raise ConfigError(
                f"{key} has the pattern {pattern!r}, but {reason}",
                code="invalid_value",
                keys=(key,),
                fix=list_override(key, [other for other in patterns if other != pattern]),
            )


def check_matched(key: str, patterns: Sequence[str], names: Collection[str], *, what: str = "parameter") -> None:
    """Raise ConfigError with the nearest name for a pattern that selects none of the parameters `names`."""
    listed = NameList(key, patterns, f"matches no {what}")
    if any(not any(matches(pattern, name) for name in names) for pattern in patterns):
        check_entries(listed, lambda pattern: any(matches(pattern, name) for name in names), _known(frozenset(names)))


@cache
def _known(names: frozenset[str]) -> set[str]:
    """Return patterns that match: parts of names without the number of the layer, and layers with it."""
    known: set[str] = set()
    for name in names:
        parts = name.split(".")[:-1] or [name]
        generic = ["*" if part.isdigit() else part for part in parts]
        for start, end in itertools.combinations(range(len(parts) + 1), 2):
            if not parts[start].isdigit() and not parts[end - 1].isdigit():
                known.add(".".join(generic[start:end]))
        known |= {".".join(parts[i : i + 2]) for i in range(len(parts) - 1) if parts[i + 1].isdigit()}
    return known
