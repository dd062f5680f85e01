"""Checks between rewards and the rows that they score."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.name_patterns import NameList, check_entries
from automodel_cli.rollout.rewards.base import RewardFunction

_MOST_VALUES = 5  # of a column, in a message


def check_reward_rows(
    rewards: Mapping[str, RewardFunction], rows: Iterable[tuple[str, Mapping[str, object]]], *, all_judged: bool
) -> None:
    """Raise ConfigError for rows without a column that an applicable reward reads, rows without any applicable reward
    (if `all_judged`), and rewards that apply to no row."""
    judging, seen = set[str](), dict[str, set[str]]()
    for origin, row in rows:
        applicable = []
        for name, reward in rewards.items():
            columns = filter_of(reward)
            _check_columns(origin, row, name, columns)
            for column in columns:
                seen.setdefault(column, set()).add(repr(row[column]))
            if applies_to(reward, row):
                fix = f"rewards.{name}.column={_nearest(reward, row)}" if hasattr(reward, "column") else None
                _check_columns(origin, row, name, getattr(reward, "columns", ()), fix)
                applicable.append(name)
        if all_judged and not applicable:
            rules = ", ".join(f"rewards.{name}.filter={dict(filter_of(reward))}" for name, reward in rewards.items())
            raise ConfigError(
                f"{origin}: no reward applies to this row: {rules}",
                code="unknown_name",
                keys=tuple(f"rewards.{name}.filter" for name in rewards),
            )
        judging |= set(applicable)
    for name, reward in rewards.items():
        if (columns := filter_of(reward)) and name not in judging:
            have = "; ".join(
                f"{column}: {', '.join(sorted(seen.get(column, ()))[:_MOST_VALUES])}" for column in columns
            )
            raise ConfigError(
                f"rewards.{name}.filter={dict(columns)} applies to no row. Rows have {have}",
                code="no_effect",
                keys=(f"rewards.{name}.filter",),
                fix=f"~rewards.{name}",
            )
        _check_filter(name, columns, seen)


def _check_filter(name: str, columns: Mapping[str, object], seen: Mapping[str, set[str]]) -> None:
    """Raise if a value of a list in `filter` occurs in no row."""
    for column, values in columns.items():
        if isinstance(values, list) and column in seen:
            absent = {str(value) for value in values if repr(value) not in seen[column]}
            listed = NameList(f"rewards.{name}.filter.{column}", [str(value) for value in values], "no row has")
            present = {str(value) for value in values} - absent
            check_entries(listed, present.__contains__, _texts(seen[column]))


def _texts(values: Iterable[str]) -> list[str]:
    """Values of rows as a config spells them."""
    return [value.strip("'") for value in values]


def _nearest(reward: RewardFunction, row: Mapping[str, object]) -> str:
    """The row's column that `column` may have meant."""
    matches = difflib.get_close_matches(str(getattr(reward, "column", "")), row, 1)
    return matches[0] if matches else "<the column>"


def _check_columns(
    origin: str, row: Mapping[str, object], name: str, columns: Iterable[str], fix: str | None = None
) -> None:
    for column in columns:
        if column not in row:
            have = ", ".join(sorted(row)) or "none"
            raise ConfigError(
                f"{origin}: rewards.{name} reads the column {column!r}, but the row has {have}",
                code="unknown_name",
                keys=(f"rewards.{name}",),
                fix=fix,
            )


def applies_to(reward: RewardFunction, row: Mapping[str, object]) -> bool:
    return all(row[name] in (v if isinstance(v, list) else [v]) for name, v in filter_of(reward).items())


def filter_of(reward: RewardFunction) -> Mapping[str, object]:
    """Return the column values of the rows that a reward scores. A class without our base class scores all rows."""
    columns: Mapping[str, object] = getattr(reward, "filter", {})
    return columns
