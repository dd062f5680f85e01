"""A single error in a config, and the `ConfigError` that lists several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import label

Finding = tuple[Literal["ok", "warn", "fail"], str, str, str]
"""Result of one check: status, subject, finding, and a fix or ""."""
COMMAND_LINE = "command line"
DEFAULT = "default"


@dataclass(frozen=True)
class Origin:
    """Place of a value. `file` is as displayed. "" stands for the command line or a default, distinguished by
    `text`.
    """

    file: str
    line: int = 0
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else self.text


@dataclass(frozen=True)
class Problem:
    """`code` is one of `config.error_codes`. `where` sorts and labels the problem. `source` is the `key=value
    (file:line)` text. `fix` can be pasted.
    """

    code: str
    key: str
    message: str
    where: Origin
    source: str | None = None
    fix: str | None = None


def format_value(value: object, limit: int = 48) -> str:
    """A config value as YAML would spell it, short enough for one line."""
    match value:
        case None | True | False:
            return {None: "null", True: "true", False: "false"}[value]
        case list() | tuple():
            text = "[" + ", ".join(format_value(v, limit) for v in value) + "]"
        case dict():
            text = "{" + ", ".join(f"{k}: {format_value(v, limit)}" for k, v in value.items()) + "}"
        case _:
            text = "''" if value == "" else str(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def as_error(problems: Sequence[Problem], title: str) -> ConfigError:
    """Combine problems into one error, sorted by file and line, with the command line last.

    A single problem keeps the form of `ConfigError`. Several become a list with the origins in a left column. `title`
    is the name of the config.
    """
    unique = {(p.key, p.message): p for p in problems}.values()
    ordered = sorted(unique, key=lambda p: (not p.where.file, p.where.file != title, p.where.file, p.where.line))
    keys = tuple(p.key for p in ordered)
    if len(ordered) == 1:
        only = ordered[0]
        source = only.source or str(only.where)
        return ConfigError(only.message, code=only.code, keys=keys, origin=source, fix=only.fix)
    width = max(len(str(p.where)) for p in ordered)
    lines = [f"{len(ordered)} errors in {title}, nothing was started"]
    for p in ordered:
        first, *rest = f"[{p.code}] {p.message}".splitlines()
        lines.append(f"  {p.where!s:<{width}}  {first}")
        lines += [f"  {'':<{width}}  {line}" for line in rest]
        if p.fix:
            lines.append(f"  {'':<{width}}  {label(p.fix)}  {p.fix}")
    error = ConfigError("\n".join(lines), code="several_errors", keys=keys)
    error.problems = tuple((p.code, p.key) for p in ordered)
    return error
