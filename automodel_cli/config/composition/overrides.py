"""Overrides of the command line: parse them, and set them in a config."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from automodel_cli.config import fix_syntax
from automodel_cli.config.composition import data_paths, hydra_adapter
from automodel_cli.config.composition.yaml_limits import check_override
from automodel_cli.config.diagnostics import COMMAND_LINE, Origin
from automodel_cli.config.errors import ConfigError


def split_overrides(
    loader: hydra_adapter.Loader, in_use: Mapping[str, Any], overrides: Sequence[str]
) -> tuple[list[hydra_adapter.Override], list[hydra_adapter.Override]]:
    """Parse the overrides into choices of group options (for Hydra) and values (for us). `~GROUP` is both: it removes
    the file of the group, and the recipe's section of the same name."""
    groups, values = [], []
    for text in overrides:
        override = _parse(text)
        group, option = override.key_or_group, override.value()
        options = loader.options(group)
        choice = isinstance(option, str) and bool(options)
        if override.package is not None or "/" in group or (override.is_delete() and group in in_use):
            groups.append(override)
        elif choice and not override.is_delete():
            if option not in options:
                near = difflib.get_close_matches(str(option), options, 1, 0.5)
                raise ConfigError(
                    f"{group}={option} must be one of: {', '.join(options)}",
                    code="invalid_choice",
                    keys=(group,),
                    origin=f"{text} (command line)",
                    fix=f"{group}={near[0] if near else options[0]}",
                )
            groups.append(_parse(f"{group}={option}" if group in in_use else f"+{group}={option}"))
        else:
            values.append(override)
    removed = [override for override in groups if override.is_delete() and override.package is None]
    chosen = {override.key_or_group.lstrip("+"): override for override in groups if not override.is_delete()}
    for override in removed:
        if (other := chosen.get(override.key_or_group)) is not None:
            raise ConfigError(
                f"{override.input_line} and {other.key_or_group.lstrip('+')}={other.value()} exclude each other",
                code="mutually_exclusive",
                keys=(override.key_or_group,),
                origin=f"{override.input_line} (command line)",
            )
    return groups, [*removed, *values]


def _parse(text: str) -> hydra_adapter.Override:
    key, equals, value = text.partition("=")
    check_override(text)
    origin = f"{text} (command line)"
    if text.startswith("-"):
        message = f"{text} is not an option. Write overrides without dashes"
        raise ConfigError(message, code="invalid_override", keys=(key,), origin=origin, fix=text.lstrip("-"))
    if not equals and not text.startswith("~"):
        message = f"{text} must have the form key=value"
        raise ConfigError(message, code="invalid_override", keys=(key,), origin=origin, fix=f"{key}=VALUE")
    try:
        override = hydra_adapter.parse(text)
    except hydra_adapter.HydraException as error:
        message = f"{text} cannot be parsed. Quote the value"
        fix = fix_syntax.override(key, value)
        raise ConfigError(message, code="invalid_override", keys=(key,), origin=origin, fix=fix) from error
    if override.is_sweep_override():
        raise _several_values(key, value, origin)
    return override


def _several_values(key: str, value: str, origin: str) -> ConfigError:
    """The answer to Hydra's sweeps: one run has one value, and `automodel sweep` makes several runs."""
    values = value.split(",")
    several = f"several runs: automodel sweep -c CONF {key}={value}"
    if "(" in value:  # range(1,4), choice(a,b)
        message = f"{key}={value} is a sweep, but a run needs one value ({several})"
        return ConfigError(message, code="invalid_override", keys=(key,), origin=origin)
    return ConfigError(
        f"{key}={value} has {len(values)} values, but a run needs one ({several})",
        code="invalid_override",
        keys=(key,),
        origin=origin,
        fix=f"{key}={values[0]}, or '{key}=[{value}]' where the key takes a list",
    )


def apply_override(config: DictConfig, override: hydra_adapter.Override, origins: dict[str, Origin]) -> None:
    """Set, merge (a dict) or delete one key. `key=`, `+key=` and `++key=` are equal, because the checker knows the
    keys."""
    key, value = override.key_or_group, override.value()
    origin = f"{override.input_line} (command line)"
    try:
        if override.is_delete():
            parent, _, leaf = key.rpartition(".")
            section = OmegaConf.select(config, parent) if parent else config
            if not isinstance(section, DictConfig) or leaf not in section:
                message = f"{key} cannot be removed because it is not set"
                raise ConfigError(message, code="invalid_override", keys=(key,), origin=origin)
            del section[leaf]
            origins.pop(key, None)
            return
        whole = value == {} or key in data_paths.WHOLE
        OmegaConf.update(config, key, value, merge=not whole, force_add=True)
    except (OmegaConfBaseException, ValueError) as error:
        raise _cannot_be_set(config, key, error, origin) from error
    if whole:
        for below in [other for other in origins if other.startswith(f"{key}.")]:
            del origins[below]
    _record_override(key, value, origins)
    while key := key.rpartition(".")[0]:  # a section that exists only because of this override
        origins.setdefault(key, Origin("", text=COMMAND_LINE))


def _cannot_be_set(config: DictConfig, key: str, error: Exception, origin: str) -> ConfigError:
    """Return the error of an override that uses a name or an invalid index in a list, or a key below a plain value."""
    parts = key.split(".")
    above = [".".join(parts[:n]) for n in range(len(parts) - 1, 0, -1)]
    listed = next((name for name in above if isinstance(_selected(config, name), ListConfig)), None)
    if listed is None:
        message = f"{key} cannot be set: {str(error).splitlines()[0]}"
        return ConfigError(message, code="invalid_override", keys=(key,), origin=origin)
    rest = key[len(listed) + 1 :]
    number = len(_selected(config, listed))
    if rest.partition(".")[0].isdigit():
        held = "is empty" if number == 0 else f"has entries 0 to {number - 1}"
        message = f"{key} cannot be set: {listed} {held}"
        return ConfigError(message, code="invalid_override", keys=(key,), origin=origin)
    from automodel_cli.config.keys import reference as key_reference

    target = key_reference.node_for(listed, {rest: None})
    value = origin.removesuffix(" (command line)").partition("=")[2]
    fix = shlex.quote(f"{listed}=[{{_target_: {target}, {rest}: {value}}}]") if target else None
    message = f"{key} cannot be set: {listed} is a list, whose entries have numbers instead of names"
    return ConfigError(message, code="invalid_override", keys=(key,), origin=origin, fix=fix)


def _selected(config: DictConfig, key: str) -> Any:
    try:
        return OmegaConf.select(config, key)
    except OmegaConfBaseException:
        return None


def _record_override(key: str, value: object, origins: dict[str, Origin]) -> None:
    origins[key] = Origin("", text=COMMAND_LINE)
    match value:
        case dict():
            for k, v in value.items():
                _record_override(f"{key}.{k}", v, origins)
        case list():
            for i, v in enumerate(value):
                _record_override(f"{key}.{i}", v, origins)
