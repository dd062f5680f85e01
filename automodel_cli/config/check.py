"""The strict check: every `_target_` bound to its signature, every error at once, then the tree of objects.

Two passes. `_Binder` walks the composed tree against annotations and calls nothing. `_Builder` then constructs
bottom-up every frozen dataclass whose subtree is clean, so that the rules of `__post_init__` report together with the
typing errors; objects of other packages are constructed only when nothing at all is wrong.
"""

from __future__ import annotations

import functools
import os
import sys
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from automodel_cli.config import schema, targets, values
from automodel_cli.config import trust as trusting
from automodel_cli.config.compose import MISSING, Composed
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fixes import map_keys
from automodel_cli.config.imports.tables import recognise
from automodel_cli.config.problems import Origin, Problem, show
from automodel_cli.config.suggest import section as nearest_section
from automodel_cli.config.suggest import suggest
from automodel_cli.config.trust import NOTHING, Need, Trust

_WRONG = object()
"""A value that has already been reported."""


@dataclass
class _Node:
    """One bound target. `clean` is False when a keyword is unknown or missing; a wrong value is `_WRONG`."""

    key: str
    target: Callable[..., Any]
    partial: bool
    signature: schema.Signature
    arguments: dict[str, Any] = field(default_factory=dict)
    clean: bool = True


def check(
    composed: Composed, trust: Trust = NOTHING, untrusted: list[Need] | None = None, *, kind: type | None = None
) -> Any:
    """Check the whole config and build its root. `trust` is what the command line allows it to execute.

    Nothing but config nodes (frozen dataclasses, pure to construct) runs before every error is known. Raises one
    ConfigError with all of them, sorted by file and line. What is not trusted is an error too; with the list
    `untrusted` it is added there instead, and the field has its default: for commands that execute nothing. `kind` is
    the class of a root that names no `_target_`; without one such a file is refused.
    """
    for name in trust.packages:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(f"--trust-package {name}: a package name is expected")
    if trust.packages and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # a trusted package may lie beside the user's config; appended, it shadows nothing
    binder = _Binder(composed, trust, untrusted)
    root = binder.root(kind)
    problems = binder.problems
    built = _WRONG
    for only_nodes in (True, False):  # nodes are pure, so building them twice is only a matter of microseconds
        if root is not None and built is _WRONG:
            built = _Builder(composed, problems, only_nodes).build(root)
        if problems:
            raise composed.error(problems)
    return built


class _Binder:
    def __init__(self, composed: Composed, trust: Trust, untrusted: list[Need] | None):
        self.composed, self.trust, self.untrusted = composed, trust, untrusted
        self.problems: list[Problem] = list(composed.problems)
        self.reported = {p.key for p in composed.problems}
        self.known: dict[str, None] = {}
        self.unknown: list[tuple[str, object]] = []

    def root(self, kind: type | None) -> _Node | None:
        tree = self.composed.tree
        if "_target_" not in tree and kind is None:
            self.refuse_without_recipe()
            return None
        node = self.node(tree, "", kind)
        tool = recognise(tree, [key for key, _ in self.unknown if "." not in key])
        if tool is not None:
            self.add("", f"these are keys of {tool.tool}, which have other names here; each is translated below")
            self.problems.insert(0, self.problems.pop())
        for key, value in self.unknown:
            self.report_unknown(key, value)
        return node

    def refuse_without_recipe(self) -> None:
        """No `_target_`: the file forgot its base, or was written for another tool, whose keys are then translated."""
        tree = self.composed.tree
        tool = recognise(tree)
        if tool is None:
            fix = "defaults: [sft, _self_]   at the top of the file"
            self.add("", "no recipe: the root has no _target_", fix=fix)
            return
        recipe = schema.keys(targets.resolve("recipes.sft.SFTRecipe"))
        known = {*recipe, "optimizer.lr", "optimizer.betas", "optimizer.eps", "lr_scheduler.warmup_ratio"}
        known |= {"lr_scheduler.warmup_steps", "parallelizer.activation_checkpointing", "parallelizer.enable_compile"}
        fixes = [found.fix for k, v in _leaves(tree, "") if (found := suggest(k, v, known)) and found.fix]
        text = (
            f"this is a {tool.tool} config, and this program reads its own (begin one with `defaults: [sft, _self_]`); "
            f"automodel import-config {self.composed.path.name} translates it"
        )
        known_here = " ".join(dict.fromkeys(fixes))
        self.add("", text, fix=f"automodel check -c sft {known_here}   (what of it has a name here)")

    def add(self, key: str, message: str, fix: str | None = None, *, source: bool = True) -> None:
        where = self.composed.nearest_origin(key)
        text = f"{key}={show(_at(self.composed.tree, key))} ({where})" if source and key else str(where)
        self.problems.append(Problem(key, message, where, text, fix))

    def node(self, value: dict[str, Any], key: str, hint: Any) -> _Node | None:
        """Bind one mapping to its `_target_`, or to the one dataclass that the annotation names."""
        path = _join(key, "_target_")
        try:
            target = targets.resolve(value["_target_"], self.trust.packages) if "_target_" in value else hint
        except ConfigError as error:
            self.add(path, error.message, _prefixed(error.fix, key))
            return None
        partial = value.get("_partial_", False)
        if not isinstance(partial, bool):
            self.add(_join(key, "_partial_"), f"{_join(key, '_partial_')} expects true or false, got {show(partial)}")
        if partial and targets.is_own(target):
            self.add(_join(key, "_partial_"), f"{key} is a config node of ours and takes no _partial_")
        node = _Node(key, target, partial is True, schema.signature(target))
        self.arguments(node, value)
        return node

    def arguments(self, node: _Node, value: dict[str, Any]) -> None:
        parameters = node.signature.parameters
        for name, parameter in parameters.items():
            self.known[_join(node.key, name)] = None
            inner = schema.dataclass_members(parameter.hint)
            if len(inner) == 1:
                self.known |= dict.fromkeys(schema.keys(inner[0], _join(node.key, name) + "."))
        for name, item in value.items():
            key = _join(node.key, name)
            if name in ("_target_", "_partial_"):
                continue
            if name not in parameters and not (node.signature.open and not name.startswith("_")):
                if self.composed.forget_replaced(node.key, name):
                    continue
                self.unknown.append((key, item))
                node.clean = False
                continue
            if name in parameters and schema.holds_named_nodes(parameters[name].hint):
                self.composed.forget_unasked(key)
            node.arguments[name] = self.value(item, parameters[name].hint if name in parameters else Any, key)
            if not self.trusted(node, name, key):
                del node.arguments[name]
        for name, parameter in parameters.items():
            if parameter.default is schema.REQUIRED and name not in value and not node.partial:
                node.clean = False
                self.report_missing(_join(node.key, name), parameter.hint)

    def trusted(self, node: _Node, name: str, key: str) -> bool:
        """Whether the user allows what this field executes. If not: a problem, or one more of `untrusted`."""
        value = node.arguments[name]
        found = [] if value is _WRONG else trusting.needs(node.target, name, key, value)
        lacking = [need for need in found if not self.trust.allows(need)]
        if self.untrusted is not None:
            self.untrusted += lacking
            return not lacking
        for need in lacking:
            note = f" ({self.trust.note})" if self.trust.note else ""
            message = f"{key}={show(self.composed.shown(key), 100)} {need.what}, and a config cannot allow that{note}"
            self.add(key, message, f"{need.option}   (if you trust it)")
        return True

    def value(self, value: object, hint: Any, key: str) -> Any:
        """Convert one value, or report it and return `_WRONG`."""
        if key in self.reported:
            return _WRONG
        if value == MISSING:
            self.report_missing(key, hint)
            return _WRONG
        try:
            return self.converted(value, hint, key)
        except values.Mismatch as mismatch:
            at = key + mismatch.key
            self.add(at, f"{at} {mismatch.message}", f"{at}={mismatch.fix}" if mismatch.fix is not None else None)
            return _WRONG

    def converted(self, value: object, hint: Any, key: str) -> Any:
        if isinstance(value, dict) and ("_target_" in value or "_partial_" in value):
            return self.targeted(value, hint, key)
        if isinstance(value, dict) and len(nodes := schema.dataclass_members(hint)) == 1:
            return self.node(value, key, nodes[0]) or _WRONG
        if isinstance(value, dict) and len(nodes) > 1:
            choices = " or ".join(f"{n.__module__}.{n.__qualname__}" for n in nodes)
            raise values.Mismatch(f"needs a _target_: {choices}")
        chosen = values.choose(value, hint)
        arguments = typing.get_args(chosen)
        if isinstance(value, dict):
            inner = arguments[1] if len(arguments) == 2 else Any
            return {k: self.value(v, inner, _join(key, str(k))) for k, v in value.items()}
        if isinstance(value, list):
            return self.sequence(value, chosen, key)
        return values.convert_scalar(value, chosen)

    def sequence(self, value: list[Any], hint: Any, key: str) -> Any:
        arguments = typing.get_args(hint)
        is_tuple = (typing.get_origin(hint) or hint) is tuple
        inner: list[Any] = [arguments[0] if arguments else Any] * len(value)
        if is_tuple and arguments and arguments[-1] is not Ellipsis:
            if len(arguments) != len(value):
                raise values.Mismatch(f"expects a list of {len(arguments)} values, got {show(value)}")
            inner = list(arguments)
        items = [self.value(item, h, f"{key}.{i}") for i, (item, h) in enumerate(zip(value, inner, strict=True))]
        return tuple(items) if is_tuple else items

    def targeted(self, value: dict[str, Any], hint: Any, key: str) -> Any:
        """A node with its own `_target_`: bound, and of a class that the annotation allows."""
        nodes = schema.dataclass_members(hint)
        if "_target_" not in value and len(nodes) != 1:
            raise values.Mismatch("has _partial_ but no _target_")
        self.refuse_bare_function(value, hint, key)
        node = self.node(value, key, nodes[0] if nodes else None)
        if node is None:
            return _WRONG
        self.check_kind(node, hint, value)
        return node

    def refuse_bare_function(self, value: dict[str, Any], hint: Any, key: str) -> None:
        """A function in place of a node, which would be called with what stands beside it: say what wraps it."""
        if value.get("_partial_"):
            return
        try:
            target = targets.resolve(value.get("_target_", ""), self.trust.packages)
        except ConfigError:
            return  # said when it is bound
        if wrapper := schema.wrapper_of(target, hint):
            name = value["_target_"]
            node = f"{{_target_: {wrapper}, function: {{_target_: {name}, _partial_: true}}}}"
            raise values.Mismatch(f"names the function {name}, which is called when the config is read", f"'{node}'")

    def check_kind(self, node: _Node, hint: Any, value: dict[str, Any]) -> None:
        """Refuse a target that makes none of the alternatives and lacks what a protocol among them asks for; a method
        that is only inherited as abstract is lacking."""
        protocols = schema.protocol_members(hint)
        options = tuple(
            option
            for option in schema.members(hint)
            if option not in protocols and typing.get_origin(option) is not typing.Literal  # no target makes a text
        )
        if not all(isinstance(option, type) and option is not Any for option in options):
            return
        made = node.target if isinstance(node.target, type) else schema.returned(node.target)
        if protocols and (node.partial or not isinstance(made, type)):
            return  # what comes out is known when it is called
        if not node.partial and isinstance(made, type) and options and issubclass(made, options):
            return
        message = f"expects {values.describe(schema.members(hint))}, got {value['_target_']}{_what_it_makes(node)}"
        if protocols:
            lacking = {protocol: schema.lacks(made, names) for protocol, names in protocols.items()}
            nearest = min(lacking, key=lambda protocol: len(lacking[protocol]))
            if not lacking[nearest]:
                return
            message += f", which lacks {', '.join(lacking[nearest])} of {nearest.__module__}"
        raise values.Mismatch(message)

    def report_missing(self, key: str, hint: Any) -> None:
        kind = values.describe(schema.members(hint)) if hint is not Any else "a value"
        where = self.composed.nearest_origin(key)
        self.problems.append(Problem(key, f"{key} is missing: {kind}", where, str(where), f"{key}=..."))

    def report_unknown(self, key: str, value: object) -> None:
        if key.rpartition(".")[2].startswith("_"):
            self.add(key, f"{key}: only _target_ and _partial_ have a leading underscore here")
            return
        if isinstance(value, dict) and value:
            meant = nearest_section(key, self.known)
            if meant and all(_join(meant, str(k)) in self.known for k in value):
                self.add(key, f"unknown section {key}", f"call it {meant}")
                return
            inner = [(k, v) for k, v in _leaves(value, key) if suggest(k, v, self.known)]
            for k, v in inner:
                self.report_unknown(k, v)
            if inner:
                return
        found = suggest(key, value, self.known)
        note = f" ({found.note})" if found and found.note else ""
        self.add(key, f"unknown key {key}{note}", found.fix if found else None)


class _Builder:
    def __init__(self, composed: Composed, problems: list[Problem], only_nodes: bool):
        self.composed, self.problems, self.only_nodes = composed, problems, only_nodes

    def build(self, node: _Node) -> Any:
        arguments = {name: self.value(item) for name, item in node.arguments.items()}
        wrong = not node.clean or any(_contains_wrong(item) for item in arguments.values())
        is_node = targets.is_node(node.target)
        if wrong or (self.only_nodes and not is_node and not node.partial):
            return _WRONG
        if node.partial:
            return functools.partial(node.target, **arguments)
        try:
            return node.target(**arguments)
        except ConfigError as error:
            self.refused(node, arguments, error)
        except Exception as error:
            if is_node and targets.is_own(node.target):
                raise  # a bug of ours: keep the traceback
            message = f"{node.target.__qualname__} refuses its arguments: {error}"
            self.refused(node, arguments, ConfigError(message))
        return _WRONG

    def value(self, item: Any) -> Any:
        if isinstance(item, _Node):
            return self.build(item)
        if isinstance(item, (list, tuple)):
            return type(item)(self.value(i) for i in item)
        if isinstance(item, dict):
            return {k: self.value(v) for k, v in item.items()}
        return item

    def refused(self, node: _Node, arguments: dict[str, Any], error: ConfigError) -> None:
        """A node refused its own values: name the keys, their values and where each was written."""
        keys = [_join(node.key, _located(node, arguments, k)) for k in error.keys] or [node.key]
        where = self.composed.nearest_origin(keys[0])
        source = error.origin or self.sources(node, arguments, keys)
        fix = error.fix and map_keys(error.fix, lambda key: _placed(node, arguments, key))
        self.problems.append(Problem(keys[0], error.message, where, source, fix))

    def sources(self, node: _Node, arguments: dict[str, Any], keys: list[str]) -> str:
        groups: dict[Origin, list[str]] = {}
        for key in keys:
            if key == node.key:  # the node as a whole
                groups.setdefault(self.composed.nearest_origin(key), []).append(key)
                continue
            text = f"{key}={show(_effective(node, arguments, key[len(node.key) + 1 if node.key else 0 :]))}"
            groups.setdefault(self.composed.where(key), []).append(text)
        return "; ".join(f"{', '.join(texts)} ({origin})".lstrip() for origin, texts in groups.items())


def _what_it_makes(node: _Node) -> str:
    """What is wrong with a target that is no config node of the right class, and how a model gets in all the same."""
    made = node.target if isinstance(node.target, type) else schema.returned(node.target)
    if node.key == "model":
        return (
            ": a model is described, not built, so that every rank can build its share; save yours once with "
            "save_pretrained(FOLDER) and set model.pretrained=FOLDER"
        )
    if isinstance(node.target, type):
        return ""
    if made is Any:
        return ", which does not say what it returns"
    return f", which returns {getattr(made, '__name__', made)}"


def _join(key: str, name: str) -> str:
    return f"{key}.{name}" if key else name


def _prefixed(fix: str | None, key: str) -> str | None:
    return _join(key, fix) if fix is not None and fix.startswith("_target_=") else fix


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        if isinstance(tree, list) and part.isdigit() and int(part) < len(tree):
            tree = tree[int(part)]
        elif isinstance(tree, dict) and part in tree:
            tree = tree[part]
        else:
            return None
    return tree


def _located(node: _Node, arguments: dict[str, Any], key: str) -> str:
    """A key relative to `node`. A section that a node asks for a rule may name its own fields: they are looked up
    there.
    """
    name = key.partition(".")[0]
    if name in node.signature.parameters:
        return key
    sections = [n for n in node.signature.parameters if name in _fields(_effective(node, arguments, n))]
    assert len(sections) == 1, f"{node.target.__qualname__} refuses {key}, which is a field of {sections or 'nothing'}"
    return f"{sections[0]}.{key}"


def _placed(node: _Node, arguments: dict[str, Any], key: str) -> str:
    """The key of a fix as the root knows it: nodes may name their own fields, and those of their sections."""
    name = key.partition(".")[0]
    if name in node.signature.parameters:
        return _join(node.key, key)
    if node.key:
        return key
    sections = [n for n in node.signature.parameters if name in _fields(_effective(node, arguments, n))]
    return f"{sections[0]}.{key}" if len(sections) == 1 else key


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a config node; nothing for any other value."""
    return vars(value) if targets.is_node(type(value)) else {}


def _effective(node: _Node, arguments: dict[str, Any], key: str) -> Any:
    """The value that a refused node saw under a key relative to it: as set, or the default."""
    name, *rest = key.split(".")
    if name in arguments:
        value = arguments[name]
    else:
        parameter = node.signature.parameters[name]
        value = parameter.default() if parameter.is_factory else parameter.default
    for part in rest:
        value = value[part] if isinstance(value, dict) else getattr(value, part)
    return value


def _leaves(value: object, key: str) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [leaf for k, v in value.items() if not str(k).startswith("_") for leaf in _leaves(v, _join(key, k))]
    return [(key, value)]


def _contains_wrong(built: Any) -> bool:
    if isinstance(built, (list, tuple)):
        return any(_contains_wrong(item) for item in built)
    if isinstance(built, dict):
        return any(_contains_wrong(item) for item in built.values())
    return built is _WRONG
