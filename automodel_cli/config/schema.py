"""Signature of a target: its parameters, annotations and defaults, without calling it."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard, Union

REQUIRED = object()


@dataclass(frozen=True)
class Parameter:
    """`default` is REQUIRED, a value, or a zero-argument factory if `is_factory`."""

    name: str
    hint: Any
    default: Any
    is_factory: bool = False


@dataclass(frozen=True)
class Signature:
    """`open`: further keywords are accepted (`**kwargs`)."""

    parameters: dict[str, Parameter]
    open: bool = False


def signature(target: Callable[..., Any]) -> Signature:
    """The keywords of a dataclass (its fields) or of any other callable (its signature).

    An annotation that cannot be evaluated (a name under TYPE_CHECKING, a C function) counts as Any.
    """
    if is_dataclass_type(target):
        hints = _hints(target, {f.name: f.type for f in dataclasses.fields(target)}, sys.modules[target.__module__])
        return Signature({f.name: _field(f, hints[f.name]) for f in dataclasses.fields(target) if f.init})
    try:
        inspected = inspect.signature(target)
    except (TypeError, ValueError):  # a builtin without a signature
        return Signature({}, open=True)
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    keywords = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = {name: p for name, p in inspected.parameters.items() if p.kind in keywords}
    module = sys.modules[target.__module__]
    hints = _hints(function, {name: p.annotation for name, p in named.items()}, module)
    parameters = {
        name: Parameter(name, hints[name], REQUIRED if p.default is inspect.Parameter.empty else p.default)
        for name, p in named.items()
    }
    return Signature(parameters, any(p.kind is inspect.Parameter.VAR_KEYWORD for p in inspected.parameters.values()))


def is_dataclass_type(target: object) -> TypeGuard[type]:
    """Return whether `target` is a dataclass, and no instance of one."""
    return isinstance(target, type) and dataclasses.is_dataclass(target)


def made_by(target: Callable[..., object]) -> Any:
    """Return the class of what a target returns: the class itself, or the annotation of a function."""
    return target if isinstance(target, type) else returned(target)


def returned(target: Callable[..., object]) -> Any:
    """Return the annotated return type of a function, or Any without an annotation."""
    annotation = getattr(target, "__annotations__", {}).get("return", inspect.Parameter.empty)
    return _hints(target, {"return": annotation}, sys.modules[target.__module__])["return"]


def _field(field: dataclasses.Field[object], hint: object) -> Parameter:
    if field.default is not dataclasses.MISSING:
        return Parameter(field.name, hint, field.default)
    if field.default_factory is not dataclasses.MISSING:
        return Parameter(field.name, hint, field.default_factory, is_factory=True)
    return Parameter(field.name, hint, REQUIRED)


def _hints(owner: object, raw: dict[str, object], module: types.ModuleType) -> dict[str, object]:
    try:
        hints = typing.get_type_hints(owner)
    except Exception:
        hints = {}  # one unresolvable name makes get_type_hints fail: evaluate each name separately
    return {name: hints.get(name, _evaluate(annotation, module)) for name, annotation in raw.items()}


def _evaluate(annotation: object, module: types.ModuleType) -> object:
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, vars(module))  # the annotation of an allowed target, not text from a config
    except Exception:
        return Any


def members(hint: object) -> tuple[Any, ...]:
    """Return the alternatives of a union, or the hint alone."""
    if typing.get_origin(hint) in (Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def dataclass_members(hint: object) -> list[type]:
    """The dataclasses among the alternatives."""
    return [m for m in members(hint) if is_dataclass_type(m)]


def protocol_members(hint: object) -> dict[type, frozenset[str]]:
    """The protocols among the alternatives, and the names that whatever satisfies one must have."""
    protocols = [m for m in members(hint) if isinstance(m, type) and getattr(m, "_is_protocol", False)]
    return {protocol: frozenset(_protocol_names(protocol)) for protocol in protocols}


_WRAPPERS: dict[type, str] = {}


def wraps_functions(node: str) -> Callable[[type], type]:
    """Decorator of a protocol: `node`, by its dotted name, makes one of a plain function (its field `function`)."""

    def remember(protocol: type) -> type:
        _WRAPPERS[protocol] = node
        return protocol

    return remember


def wrapper_of(target: Callable[..., object], hint: object) -> str | None:
    """Return the wrapper that turns a plain function into a node of type `hint`. None if `target` is not a function."""
    protocols = protocol_members(hint)
    made = returned(target) if isinstance(target, types.FunctionType) else target
    if isinstance(target, type) or any(
        isinstance(made, type) and not missing_members(made, n) for n in protocols.values()
    ):
        return None
    return wrapper_for(hint)


def wrapper_for(hint: object) -> str | None:
    """Return the wrapper that turns any plain function into a node of type `hint`, or None."""
    return next((_WRAPPERS[protocol] for protocol in protocol_members(hint) if protocol in _WRAPPERS), None)


def _protocol_names(protocol: type) -> Iterator[str]:
    for base in protocol.__mro__:
        if getattr(base, "_is_protocol", False):
            names = (*vars(base), *base.__annotations__)
            yield from (name for name in names if name == "__call__" or not name.startswith("_"))


def holds_named_nodes(hint: object) -> bool:
    """Whether the annotation is a dict of nodes."""
    arguments = typing.get_args(hint)
    return typing.get_origin(hint) is dict and bool(dataclass_members(arguments[1]) or protocol_members(arguments[1]))


def missing_members(made: type, names: Iterable[str]) -> list[str]:
    """Return the names in `names` that a class does not implement and does not accept as a keyword. Also return other
    abstract methods of its bases."""
    offered = signature(made).parameters
    lacking = []
    left = {name for base in made.__mro__ for name, owner in vars(base).items() if _is_abstract(owner)}
    for name in sorted({*names, *left}):
        # not by hasattr: every class itself has a __call__
        owner = next((base for base in made.__mro__ if name in vars(base)), None)
        is_there = owner is not None and not _is_abstract(vars(owner)[name])
        if not is_there and name not in offered:
            lacking.append(name)
    return lacking


def _is_abstract(member: object) -> bool:
    return bool(getattr(member, "__isabstractmethod__", False))


def keys(target: Callable[..., object], prefix: str = "") -> Iterator[str]:
    """Every dotted key that `target` accepts, following fields that name exactly one dataclass."""
    for name, parameter in signature(target).parameters.items():
        yield prefix + name
        inner = dataclass_members(parameter.hint)
        if len(inner) == 1:
            yield from keys(inner[0], f"{prefix}{name}.")
