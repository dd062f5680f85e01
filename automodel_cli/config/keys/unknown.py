"""Problems of composed keys: the text of a problem, and what an unknown key may have meant."""

from __future__ import annotations

from collections.abc import Collection

from automodel_cli.config.composition import bundled_recipes
from automodel_cli.config.composition.compose import Composed
from automodel_cli.config.diagnostics import COMMAND_LINE, Problem, format_value
from automodel_cli.config.dotted_keys import join, value_at
from automodel_cli.config.keys import reference as key_reference
from automodel_cli.config.keys.suggestions import section as nearest_section
from automodel_cli.config.keys.suggestions import set_key, suggest


def problem_at(composed: Composed, key: str, message: str, fix: str | None = None, *, code: str) -> Problem:
    """Return a problem with the value and the origin of `key`. "" is the root."""
    where = composed.nearest_origin(key)
    text = f"{key}={format_value(value_at(composed.tree, key))} ({where})" if key else str(where)
    return Problem(code, key, message, where, text, fix)


def unknown_key(composed: Composed, known: Collection[str], key: str, value: object) -> list[Problem]:
    """Return the problem of an unknown key, or those of the keys in an unknown section."""
    if key.rpartition(".")[2].startswith("_"):
        message = f"{key} is not allowed: only _target_ and _partial_ begin with an underscore"
        return [problem_at(composed, key, message, code="unknown_key")]
    if (fix := _in_section(key, value, known)) is not None:
        return [problem_at(composed, key, f"unknown section {key}", fix, code="unknown_key")]
    inner = [(k, v) for k, v in leaves(value, key) if k != key and suggest(k, v, known)]
    if inner:
        return [problem for k, v in inner for problem in unknown_key(composed, known, k, v)]
    if (problem := _of_another_node(composed, key)) is not None:
        return [problem]
    suggestion = suggest(key, value, known)
    note = f" ({suggestion.note})" if suggestion and suggestion.note else ""
    fix = suggestion.fix if suggestion else _listing(known, key)
    return [problem_at(composed, key, f"unknown key {key}{note}", fix, code="unknown_key")]


def _in_section(key: str, value: object, known: Collection[str]) -> str | None:
    """Return the overrides that give the section with a similar name this value. None if they would be invalid."""
    meant = nearest_section(key, known)
    match value:
        case str() if meant is not None and (bundled_recipes.conf_dir() / meant / f"{value}.yaml").is_file():
            return f"{meant}={value}"
        case dict() | None if meant is not None:
            below = leaves(value, meant)
            if below and all(_can_set(k, known) for k, _ in below):
                return " ".join(set_key(k, v) for k, v in below)
    return None


def _can_set(key: str, known: Collection[str]) -> bool:
    """Return whether a key is known, or is an entry of a known mapping."""
    section = key.rpartition(".")[0]
    return key in known or (
        bool(section) and not any(k.startswith(f"{section}.") for k in known) and _can_set(section, known)
    )


def _listing(known: Collection[str], key: str) -> str | None:
    """Return the command that lists the keys of the section of an unknown key."""
    section = key.rpartition(".")[0]
    is_known = any(other.startswith(f"{section}.") for other in known)
    return f"automodel options {section}" if section and is_known else None


def _of_another_node(composed: Composed, key: str) -> Problem | None:
    """Return the problem of a key of another node of this position, which remains after `_target_` was replaced."""
    section, _, name = key.rpartition(".")
    target = value_at(composed.tree, join(section, "_target_"))
    owner = key_reference.node_for(section, {name: None})
    if not isinstance(target, str) or owner is None or owner == target:
        return None
    is_typed = composed.where(key).text == COMMAND_LINE
    fix = f"remove {key} from the command line" if is_typed else f"~{key}"
    if option := key_reference.option_of(section, owner):
        fix += f", or {section}={option}"
    leaf = target.rpartition(".")[2]
    message = f"unknown key {key}: it belongs to {owner}, but {section}._target_ is {leaf}"
    return problem_at(composed, key, message, fix, code="unknown_key")


def leaves(value: object, key: str) -> list[tuple[str, object]]:
    """Return the paths and values below `key`. A scalar, a list and an empty section are their own leaf."""
    if isinstance(value, dict) and value:
        return [leaf for k, v in value.items() if not str(k).startswith("_") for leaf in leaves(v, join(key, k))]
    return [(key, value)]
