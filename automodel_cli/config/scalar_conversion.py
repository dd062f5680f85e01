"""Check one value against one annotation: strict, with a pasteable correction if the intention is clear."""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import math
import types
import typing
from typing import Any, Literal

from automodel_cli.config.diagnostics import format_value
from automodel_cli.config.schema import members, protocol_members

_INT64 = 2**63
_TOO_LONG = "expects a number of at most 64 bits"
_LISTS = (list, tuple, set, frozenset, collections.abc.Sequence, collections.abc.Iterable)
_DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int8")
_DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}


class Mismatch(Exception):
    """`key` is relative to the value (".0" of a list). `fix` is the text after `key=`, or after `fix_key=`, which is
    relative too. `code` is one of `config.error_codes`."""

    def __init__(
        self,
        message: str,
        fix: str | None = None,
        key: str = "",
        fix_key: str | None = None,
        *,
        code: str = "wrong_type",
    ):
        super().__init__(message)
        self.code, self.message, self.fix, self.key = code, message, fix, key
        self.fix_key = key if fix_key is None else fix_key


def is_dtype(hint: object) -> bool:
    """Return whether the annotation is torch.dtype, by its name, because torch is not imported here."""
    return isinstance(hint, type) and hint.__module__ == "torch" and hint.__name__ == "dtype"


def fits(value: object, hint: object) -> bool:
    """Return whether `value` has the outer shape of one alternative. `convert` checks the contents."""
    origin: Any = typing.get_origin(hint) or hint
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(hint))
    if protocols := protocol_members(origin):
        return all(hasattr(value, name) for name in protocols[origin])
    if origin in (Any, object) or not isinstance(origin, type):
        return True  # an annotation that values cannot be compared with
    match value:
        case None:
            return hint is types.NoneType
        case bool():
            return origin is bool
        case int() if origin is float:
            return True
        case int() | float() | str():
            return isinstance(value, origin) or (is_dtype(hint) and type(value) is str)
        case list():
            return origin in _LISTS
        case dict():
            return origin in _DICTS or dataclasses.is_dataclass(origin)
    return False


def choose_alternative(value: object, hint: object) -> object:
    """The alternative of `hint` that `value` is meant for. Raises Mismatch when there is none."""
    options = members(hint)
    exact = [m for m in options if m is type(value)]
    fitting = exact or [m for m in options if fits(value, m)]
    if fitting:
        return fitting[0]
    raise _mismatch(value, options)


def check_number(value: object, hint: object, name: str) -> None:
    """Raise Mismatch for a number that no setting can be: infinite, beyond 64 bits, or a negative seed."""
    if hint not in (int, float):
        return
    match value:
        case bool():
            return
        case int() if abs(value) >= _INT64:
            got = f", got {value:.3e}" if abs(value) < 1e300 else ""
            raise Mismatch(f"{_TOO_LONG}{got}", code="out_of_range")
        case float() if math.isinf(value):
            raise Mismatch(f"expects a finite number, got {value}", code="out_of_range")
        case int() | float() if name == "seed" and value < 0:
            raise Mismatch(f"expects a number of at least 0, got {value}", str(-value), code="out_of_range")


def convert_scalar(value: object, hint: object) -> object:
    """A scalar as the chosen alternative wants it: an int for a float, a dtype name as torch.dtype."""
    if hint is float and isinstance(value, int):
        return float(value)
    if is_dtype(hint):
        return _dtype(str(value))
    return value


def describe_alternatives(options: tuple[object, ...]) -> str:
    """The alternatives in words, for "expects ..."."""
    words: list[str] = []
    for option in options:
        words += _type_names(option)
    unique = list(dict.fromkeys(words))
    return unique[0] if len(unique) == 1 else f"{', '.join(unique[:-1])} or {unique[-1]}"


def _type_names(hint: object) -> list[str]:
    origin: Any = typing.get_origin(hint) or hint
    if origin is Literal:
        return [format_value(choice) for choice in typing.get_args(hint)]
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null"}
    if origin in names:
        return [names[origin]]
    if is_dtype(hint):
        return ["a dtype such as bfloat16"]
    arguments = typing.get_args(hint)
    if origin is tuple and arguments and arguments[-1] is not Ellipsis:
        return [f"a list of {len(arguments)} values"]
    if origin in _LISTS:
        return ["a list" + (f" of {_plural(arguments[0])}" if arguments else "")]
    if origin in _DICTS:
        return ["a section of any keys"]
    if protocol_members(origin):
        return [f"a section with the _target_ of {_with_article(origin)}"]
    name = getattr(origin, "__name__", str(origin))
    return [f"a section ({name})" if dataclasses.is_dataclass(origin) else name]


def _with_article(protocol: type) -> str:
    name = protocol.__name__
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _plural(hint: object) -> str:
    names: dict[object, str] = {int: "whole numbers", float: "numbers", bool: "true or false", str: "texts"}
    return names.get(hint) or describe_alternatives(members(hint))


def _mismatch(value: object, options: tuple[object, ...]) -> Mismatch:
    got = f"'{value}'" if isinstance(value, str) else format_value(value)
    is_choice = any(typing.get_origin(option) is Literal for option in options)
    message, code = (
        f"expects {describe_alternatives(options)}, got {got}",
        "invalid_choice" if is_choice else "wrong_type",
    )
    return Mismatch(message, _correction(value, options), code=code)


def _correction(value: object, options: tuple[object, ...]) -> str | None:
    """Return the probable intention, as text after `key=`."""
    choices = [choice for o in options if typing.get_origin(o) is Literal for choice in typing.get_args(o)]
    if choices:
        return _choice(value, choices, nothing=types.NoneType in options)
    if value is False and types.NoneType in options and bool not in options:
        return "null"
    if value is True or str(value).lower() in _ON:
        sections = [option for option in options if dataclasses.is_dataclass(option)]
        if len(sections) == 1 and not any(_is_required(field) for field in dataclasses.fields(sections[0])):
            return "{}"
    match value:
        case str() if bool in options and value.lower() in ("yes", "on", "no", "off", "true", "false"):
            return "true" if value.lower() in ("yes", "on", "true") else "false"
        case str() if float in options or int in options:
            try:
                number = float(value)
            except ValueError:
                return None
            return value if float in options else str(int(number)) if number.is_integer() else None
        case float() if int in options and value.is_integer():
            return str(int(value))
        case int() | float() if str in options:
            return f"'\"{format_value(value)}\"'"
        case dict() | list() | None:
            return None
    return f"[{format_value(value)}]" if any((typing.get_origin(o) or o) in _LISTS for o in options) else None


def _is_required(field: dataclasses.Field[object]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


_ON = ("true", "yes", "on", "auto")
_OFF = ("none", "off", "never", "false", "no")


def _choice(value: object, choices: list[object], nothing: bool) -> str | None:
    """Return the most similar choice. For booleans: the choice that disables, or the first that does not."""
    off = [format_value(choice) for choice in choices if str(choice).lower() in _OFF] + ["null"] * nothing
    if value is None or value is False or str(value).lower() in _OFF:
        return off[0] if off else None
    if value is True:
        return next((format_value(choice) for choice in choices if format_value(choice) not in off), None)
    if isinstance(value, (dict, list)):
        return None
    near = difflib.get_close_matches(str(value).lower(), [str(c) for c in choices], 1, 0.4)
    return near[0] if near else format_value(choices[0])


def _dtype(name: str) -> object:
    import torch

    dtype = getattr(torch, name.removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype):
        return dtype
    near = difflib.get_close_matches(name.lower(), _DTYPES, 1, 0.3)
    fix = _DTYPE_ALIASES.get(name.lower()) or (near[0] if near else None)
    raise Mismatch(f"expects a dtype such as bfloat16, got '{name}'", fix, code="invalid_choice")
