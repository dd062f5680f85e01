"""Checks of one value that config nodes share: a choice from a list, a number in a range."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import NoReturn

from automodel_cli.config.errors import ConfigError


def check_choice(name: str, value: object, choices: Iterable[object], *, fix: str | None = None) -> None:
    """Raise ConfigError unless `value` is one of `choices`.

    Args:
        name: the key of the value, relative to the node that raises.
        choices: all accepted values. None prints as null, and True as true.
        fix: text that can be pasted.
    """
    choices = tuple(choices)
    if not any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        raise ConfigError(
            f"{name}={value!r} {choice_rule(map(_yaml, choices))}", code="invalid_choice", keys=(name,), fix=fix
        )


def check_range(
    name: str,
    value: float | None,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    unit: str = "",
    note: str = "",
    fix: str | None = None,
) -> None:
    """Raise ConfigError unless `value` is None or satisfies all bounds. NaN satisfies none.

    Args:
        name: the key of the value, relative to the node that raises.
        unit: printed behind the value.
        note: printed behind the rule, with its own space or comma.
        fix: text that can be pasted.
    """
    if value is None or (
        (at_least is None or value >= at_least)
        and (above is None or value > above)
        and (at_most is None or value <= at_most)
        and (below is None or value < below)
    ):
        return
    rule = range_rule({"at_least": at_least, "above": above, "at_most": at_most, "below": below})
    shown = f"{value} {unit}".rstrip()
    raise ConfigError(f"{name}={shown} {rule}{note}", code="out_of_range", keys=(name,), fix=fix)


def check_minimums(node: object, **minimums: int) -> None:
    """Raise ConfigError for a field of `node` below its minimum. None passes."""
    for name, minimum in minimums.items():
        check_range(name, getattr(node, name), at_least=minimum, fix=f"{name}={minimum}")


def check_positive(section: str, **fields: int | float | None) -> None:
    """Raise ConfigError for a field that is zero or negative. None passes."""
    for name, value in fields.items():
        check_range(name, value, above=0, fix=f"{section}.{name}=1")


def reject_fields(node: object, code: str, reason: str, *names: str, fix: str) -> NoReturn:
    """Raise ConfigError about the values of `names`, which are fields of `node`: their values, then `reason`."""
    values = " with ".join(f"{name}={getattr(node, name)}" for name in names)
    raise ConfigError(f"{values} {reason}", code=code, keys=names, fix=fix)


def require_package(module: str, feature: str, *, install: str, keys: tuple[str, ...] = ()) -> None:
    """Raise ConfigError unless `module` is installed. Does not import it.

    Args:
        module: the name to import.
        feature: what requires the package, the subject of the message.
        install: the arguments of `pip install`, and what else can be done instead.
        keys: the keys that ask for the feature.
    """
    if find_spec(module) is None:
        raise ConfigError(
            f"{feature} requires the package {module}, which is not installed",
            code="missing_package",
            keys=keys,
            fix=f"pip install {install}",
        )


def choice_rule(choices: Iterable[str]) -> str:
    return f"must be one of: {', '.join(choices)}"


def range_rule(bounds: dict[str, object]) -> str:
    """Return the rule in words. None stands for a missing bound."""
    parts = [f"{kind.replace('_', ' ')} {bound}" for kind, bound in bounds.items() if bound is not None]
    return f"must be {' and '.join(parts)}"


def _yaml(value: object) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
