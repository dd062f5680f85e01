"""Check composed values against annotations. Binds every `_target_` to its signature and collects all errors."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from automodel_cli.config import scalar_conversion, schema
from automodel_cli.config.composition.compose import MISSING, Composed
from automodel_cli.config.diagnostics import Problem, format_value
from automodel_cli.config.dotted_keys import join
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import word
from automodel_cli.config.importer_registry import recognise
from automodel_cli.config.keys import reference as key_reference
from automodel_cli.config.keys.suggestions import suggest
from automodel_cli.config.keys.unknown import leaves, problem_at, unknown_key
from automodel_cli.config.security import targets
from automodel_cli.config.security import trust as trusting
from automodel_cli.config.security.trust import Need, Trust

_WHOLE = 10_000  # characters: text that users paste is not truncated
WRONG = object()
"""A value that has already been reported."""


@dataclass
class BoundTarget:
    """One bound target. `clean` is False if a keyword is unknown or missing. An invalid value is `WRONG`."""

    key: str
    target: Callable[..., object]
    partial: bool
    signature: schema.Signature
    arguments: dict[str, object] = field(default_factory=dict)
    clean: bool = True


class Binder:
    """Walks a composed tree against annotations. Errors are added to `problems`. No target is called."""

    def __init__(self, composed: Composed, trust: Trust, untrusted: list[Need] | None):
        self.composed, self.trust, self.untrusted = composed, trust, untrusted
        self.problems: list[Problem] = list(composed.problems)
        self.reported = {p.key for p in composed.problems}
        self.known: dict[str, None] = {}
        self.unknown: list[tuple[str, object]] = []

    def root(self, kind: type | None) -> BoundTarget | None:
        tree = self.composed.tree
        if "_target_" not in tree and kind is None:
            self.refuse_without_recipe()
            return None
        node = self.node(tree, "", kind)
        tool = recognise(tree, [key for key, _ in self.unknown if "." not in key])
        if tool is not None:
            self.add("no_recipe", "", f"the keys are those of {tool.tool}. Each key is translated below")
            self.problems.insert(0, self.problems.pop())
        for key, value in self.unknown:
            self.problems += unknown_key(self.composed, self.known, key, value)
        return node

    def refuse_without_recipe(self) -> None:
        """No `_target_`: the file forgot its base, or was written for another tool, whose keys are then translated."""
        tree = self.composed.tree
        tool = recognise(tree)
        if tool is None:
            fix = "defaults: [sft, _self_]   at the top of the file"
            self.add("no_recipe", "", "the config selects no recipe: the root has no _target_", fix=fix)
            return
        recipe = schema.keys(targets.resolve("automodel_cli.recipes.sft.SFTRecipe"))
        known = {*recipe, "optimizer.lr", "optimizer.betas", "optimizer.eps", "lr_scheduler.warmup_ratio"}
        known |= {"lr_scheduler.warmup_steps", "parallelizer.activation_checkpointing", "parallelizer.enable_compile"}
        fixes = [suggestion.fix for k, v in leaves(tree, "") if (suggestion := suggest(k, v, known)) and suggestion.fix]
        text = (
            f"this is a {tool.tool} config. Translate it with `automodel import-config "
            f"{word(self.composed.path.name)}`, or begin a new config with `defaults: [sft, _self_]`"
        )
        known_here = " ".join(dict.fromkeys(fixes))
        self.add("no_recipe", "", text, fix=f"automodel check -c sft {known_here}   (the keys that exist here)")

    def add(self, code: str, key: str, message: str, fix: str | None = None) -> None:
        self.problems.append(problem_at(self.composed, key, message, fix, code=code))

    def node(self, value: dict[str, Any], key: str, hint: Any) -> BoundTarget | None:
        """Bind one mapping to its `_target_`, or to the one dataclass that the annotation names."""
        path = join(key, "_target_")
        try:
            target = targets.resolve(value["_target_"], self.trust.packages) if "_target_" in value else hint
        except ConfigError as error:
            self.add(error.code, path, error.message, _prefixed(error.fix, key))
            return None
        partial = value.get("_partial_", False)
        at = join(key, "_partial_")
        if not isinstance(partial, bool):
            self.add("wrong_type", at, f"{at} must be true or false, got {format_value(partial)}")
        if partial and targets.is_own(target):
            self.add(
                "not_supported", at, f"{at}=true is not supported for {value.get('_target_', key)}, a config class"
            )
        node = BoundTarget(key, target, partial is True, schema.signature(target))
        self.arguments(node, value)
        return node

    def arguments(self, node: BoundTarget, value: dict[str, object]) -> None:
        parameters = node.signature.parameters
        for name, parameter in parameters.items():
            self.known[join(node.key, name)] = None
            inner = schema.dataclass_members(parameter.hint)
            if len(inner) == 1:
                self.known |= dict.fromkeys(schema.keys(inner[0], join(node.key, name) + "."))
        for name, item in value.items():
            key = join(node.key, name)
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
                self.report_missing(join(node.key, name), parameter.hint)

    def trusted(self, node: BoundTarget, name: str, key: str) -> bool:
        """Return whether the user allows the code that this field executes. If not, add a problem, or to
        `untrusted`."""
        value = node.arguments[name]
        untrusted = [] if value is WRONG else trusting.needs(node.target, name, key, value)
        lacking = [need for need in untrusted if not self.trust.allows(need)]
        if self.untrusted is not None:
            self.untrusted += lacking
            return not lacking
        for need in lacking:
            note = f" ({self.trust.note})" if self.trust.note else ""
            message = (
                f"{key}={format_value(self.composed.shown(key), 100)} {need.what}. A config cannot allow that{note}"
            )
            self.add("untrusted_code", key, message, f"{need.option}   (if you trust it)")
        return True

    def value(self, value: object, hint: object, key: str) -> object:
        """Convert one value, or report it and return `WRONG`."""
        if key in self.reported:
            return WRONG
        if value == MISSING:
            self.report_missing(key, hint)
            return WRONG
        try:
            return self.converted(value, hint, key)
        except scalar_conversion.Mismatch as mismatch:
            at = key + mismatch.key
            fix = f"{key}{mismatch.fix_key}={mismatch.fix}" if mismatch.fix is not None else None
            self.add(mismatch.code, at, f"{at} {mismatch.message}", fix)
            return WRONG

    def converted(self, value: object, hint: object, key: str) -> object:
        match value:
            case dict():
                return self.section(value, hint, key)
            case list():
                return self.sequence(value, scalar_conversion.choose_alternative(value, hint), key)
        chosen = scalar_conversion.choose_alternative(value, hint)
        scalar_conversion.check_number(value, chosen, key.rpartition(".")[2])
        return scalar_conversion.convert_scalar(value, chosen)

    def section(self, value: dict[str, object], hint: object, key: str) -> object:
        nodes = schema.dataclass_members(hint)
        if "_target_" in value or "_partial_" in value:
            return self.targeted(value, hint, key)
        if len(nodes) == 1:
            return self.node(value, key, nodes[0]) or WRONG
        if (wrapper := schema.wrapper_for(hint)) and "function" in value:
            raise scalar_conversion.Mismatch("has no _target_", wrapper, "._target_", code="missing_key")
        if nodes:
            choices = " or ".join(f"{n.__module__}.{n.__qualname__}" for n in nodes)
            raise scalar_conversion.Mismatch(f"needs a _target_: {choices}", code="missing_key")
        try:
            arguments = typing.get_args(scalar_conversion.choose_alternative(value, hint))
        except scalar_conversion.Mismatch as mismatch:
            if target := key_reference.node_for(key, value):
                raise scalar_conversion.Mismatch(
                    mismatch.message, target, fix_key="._target_", code=mismatch.code
                ) from None
            raise
        inner = arguments[1] if len(arguments) == 2 else Any
        return {k: self.value(v, inner, join(key, k)) for k, v in value.items()}

    def sequence(self, value: list[object], hint: object, key: str) -> object:
        arguments = typing.get_args(hint)
        is_tuple = (typing.get_origin(hint) or hint) is tuple
        inner: list[Any] = [arguments[0] if arguments else Any] * len(value)
        if is_tuple and arguments and arguments[-1] is not Ellipsis:
            if len(arguments) != len(value):
                raise scalar_conversion.Mismatch(
                    f"expects a list of {len(arguments)} values, got {format_value(value)}"
                )
            inner = list(arguments)
        items = [self.value(item, h, f"{key}.{i}") for i, (item, h) in enumerate(zip(value, inner, strict=True))]
        return tuple(items) if is_tuple else items

    def targeted(self, value: dict[str, object], hint: object, key: str) -> object:
        """Check a node with its own `_target_`: bind it, and require a class that the annotation allows."""
        nodes = schema.dataclass_members(hint)
        if "_target_" not in value and len(nodes) != 1:
            raise scalar_conversion.Mismatch("has _partial_ but no _target_", code="missing_key")
        self.refuse_bare_function(value, hint, key)
        node = self.node(value, key, nodes[0] if nodes else None)
        if node is None:
            return WRONG
        self.check_kind(node, hint, value)
        return node

    def refuse_bare_function(self, value: dict[str, object], hint: object, key: str) -> None:
        """Check a function in place of a node, and suggest its wrapper. Keys that the wrapper has (weights) stay with
        it, the others are arguments of the function."""
        if value.get("_partial_"):
            return
        try:
            target = targets.resolve(value.get("_target_", ""), self.trust.packages)
        except ConfigError:
            return  # reported when it is bound
        if wrapper := schema.wrapper_of(target, hint):
            name, known = value["_target_"], schema.signature(targets.resolve(wrapper, self.trust.packages)).parameters
            siblings = {key: kept for key, kept in value.items() if key in known}
            function = {key: given for key, given in value.items() if key not in known} | {"_partial_": True}
            node = format_value({"_target_": wrapper, **siblings, "function": function}, limit=_WHOLE)
            message = f"must not be a bare function: {name} would be called when the config is read"
            raise scalar_conversion.Mismatch(message, f"'{node}'", code="invalid_target")

    def check_kind(self, node: BoundTarget, hint: Any, value: dict[str, object]) -> None:
        """Report a target that returns none of the alternatives and lacks methods of a protocol among them. Inherited
        abstract methods count as missing."""
        protocols = schema.protocol_members(hint)
        options = tuple(
            option
            for option in schema.members(hint)
            if option not in protocols and typing.get_origin(option) is not typing.Literal  # no target makes a text
        )
        if not all(isinstance(option, type) and option is not Any for option in options):
            return
        made = schema.made_by(node.target)
        if protocols and (node.partial or not isinstance(made, type)):
            return  # the result is checked when it is called
        if not node.partial and isinstance(made, type) and options and issubclass(made, options):
            return
        expected = scalar_conversion.describe_alternatives(schema.members(hint))
        message = f"expects {expected}, got {value['_target_']}{_what_it_makes(node)}"
        if protocols:
            lacking = {protocol: schema.missing_members(made, names) for protocol, names in protocols.items()}
            nearest = min(lacking, key=lambda protocol: len(lacking[protocol]))
            if not lacking[nearest]:
                return
            message += f", which lacks {', '.join(lacking[nearest])} of {nearest.__module__}"
        raise scalar_conversion.Mismatch(message, code="invalid_target")

    def report_missing(self, key: str, hint: object) -> None:
        kind = scalar_conversion.describe_alternatives(schema.members(hint)) if hint is not Any else "a value"
        where = self.composed.nearest_origin(key)
        message = f"{key} is missing: expects {kind}"
        self.problems.append(Problem("missing_key", key, message, where, str(where), f"{key}=..."))


def _what_it_makes(node: BoundTarget) -> str:
    """Return the error of a target that is not a config node of the right class, and how to use a model instead."""
    made = schema.made_by(node.target)
    if node.key == "model":
        return (
            ". Each rank builds its share of the model, so the config describes the model. Save yours with "
            "save_pretrained(FOLDER) and set model.pretrained=FOLDER"
        )
    if isinstance(node.target, type):
        return ""
    if made is Any:
        return ", which has no return annotation"
    return f", which returns {getattr(made, '__name__', made)}"


def _prefixed(fix: str | None, key: str) -> str | None:
    return join(key, fix) if fix is not None and fix.startswith("_target_=") else fix
