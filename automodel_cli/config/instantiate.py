"""Construct the object tree bottom-up from the bound nodes."""

from __future__ import annotations

import functools
from typing import Any

from automodel_cli.config.composition.compose import Composed
from automodel_cli.config.diagnostics import Origin, Problem, format_value
from automodel_cli.config.dotted_keys import join, value_at
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import map_keys
from automodel_cli.config.security import targets
from automodel_cli.config.type_checking import WRONG, BoundTarget


class Builder:
    """Builds every frozen dataclass with a valid subtree, so that rules of `__post_init__` are reported together with
    type errors. Objects of other packages are built after `only_nodes` is off, when there are no errors.
    """

    def __init__(self, composed: Composed, problems: list[Problem], only_nodes: bool):
        self.composed, self.problems, self.only_nodes = composed, problems, only_nodes

    def build(self, node: BoundTarget) -> Any:
        """Call the target of `node` with its built arguments. Returns `WRONG` if any of them is invalid."""
        arguments = {name: self.value(item) for name, item in node.arguments.items()}
        wrong = not node.clean or any(_contains_wrong(item) for item in arguments.values())
        is_node = targets.is_node(node.target)
        if wrong or (self.only_nodes and not is_node and not node.partial):
            return WRONG
        if node.partial:
            return functools.partial(node.target, **arguments)
        try:
            return node.target(**arguments)
        except ConfigError as error:
            self.refused(node, arguments, error)
        except Exception as error:
            if is_node and targets.is_own(node.target):
                raise  # a bug of ours: keep the traceback
            message = f"{node.target.__qualname__} rejects its arguments: {error}"
            self.refused(node, arguments, ConfigError(message, code="invalid_arguments"))
        return WRONG

    def value(self, item: object) -> object:
        match item:
            case BoundTarget():
                return self.build(item)
            case list():
                return [self.value(i) for i in item]
            case tuple():
                return tuple(self.value(i) for i in item)
            case dict():
                return {k: self.value(v) for k, v in item.items()}
        return item

    def refused(self, node: BoundTarget, arguments: dict[str, object], error: ConfigError) -> None:
        """Report a node that rejects its values: the keys, their values and origins."""
        located = [_located(node, arguments, key) for key in error.keys]
        keys = [join(node.key, key) if key else node.key for key in located] or [node.key]
        where = self.composed.nearest_origin(keys[0])
        source = error.origin or self.sources(node, arguments, keys)
        fix = error.fix and map_keys(error.fix, lambda key: _placed(node, arguments, key))
        self.problems.append(Problem(error.code, keys[0], error.message, where, source, fix))

    def sources(self, node: BoundTarget, arguments: dict[str, object], keys: list[str]) -> str:
        groups: dict[Origin, list[str]] = {}
        for key in keys:
            if key == node.key:  # the complete node
                groups.setdefault(self.composed.nearest_origin(key), []).append(key)
                continue
            text = f"{key}={format_value(_effective(node, arguments, key[len(node.key) + 1 if node.key else 0 :]))}"
            groups.setdefault(self.composed.where(key), []).append(text)
        return "; ".join(f"{', '.join(texts)} ({origin})".lstrip() for origin, texts in groups.items())


def _located(node: BoundTarget, arguments: dict[str, object], key: str) -> str:
    """Resolve a key relative to `node`. If a section raises on behalf of a node, the key may be one of its fields. ""
    (the complete node) if neither has the key.
    """
    name = key.partition(".")[0]
    if name in node.signature.parameters:
        return key
    sections = [n for n in node.signature.parameters if name in _fields(_effective(node, arguments, n))]
    return f"{sections[0]}.{key}" if len(sections) == 1 else ""


def _placed(node: BoundTarget, arguments: dict[str, object], key: str) -> str:
    """Return the key of a fix relative to the root. Nodes may name their fields and those of their sections."""
    name = key.partition(".")[0]
    if name in node.signature.parameters:
        return join(node.key, key)
    if node.key:
        return key
    sections = [n for n in node.signature.parameters if name in _fields(_effective(node, arguments, n))]
    return f"{sections[0]}.{key}" if len(sections) == 1 else key


def _fields(value: object) -> dict[str, object]:
    """Return the fields of a config node, or nothing for any other value."""
    return vars(value) if targets.is_node(type(value)) else {}


def _effective(node: BoundTarget, arguments: dict[str, object], key: str) -> object:
    """Return the value of a key relative to the rejected node: as set, or the default."""
    name, _, rest = key.partition(".")
    if name in arguments:
        value = arguments[name]
    else:
        parameter = node.signature.parameters[name]
        value = parameter.default() if parameter.is_factory else parameter.default
    return value_at(value, rest) if rest else value


def _contains_wrong(built: object) -> bool:
    match built:
        case list() | tuple():
            return any(map(_contains_wrong, built))
        case dict():
            return any(map(_contains_wrong, built.values()))
    return built is WRONG
