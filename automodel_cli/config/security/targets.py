"""Which objects a config may name in `_target_`.

An allow-list, compared twice: the text before anything is imported, and the module and qualified name of the object
that the text resolves to. An alias (`automodel_cli.config.composition.compose.yaml.dump`) is therefore checked by its
real name.
Hydra itself keeps a deny-list and runs everything else.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
import re
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from automodel_cli.config.errors import ConfigError

OWN = ("automodel_cli",)
"""Only frozen dataclasses are config nodes in these modules. Functions and other classes are rejected."""

THIRD_PARTY = (
    "torch.optim",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torchao.optim",
    "bitsandbytes.optim",
)
"""Classes only."""


def inside(name: str, packages: Sequence[str]) -> bool:
    """Whether a dotted name lies in one of the packages."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def resolve(path: object, trust: Sequence[str] = ()) -> Callable[..., object]:
    """The class (or, in a package named by --trust-package, the function) that `path` names.

    Raises ConfigError if the text or the object is outside the allow-list, if it does not exist, or if a config cannot
    build it.
    """
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
        message = f"_target_ must be a dotted name such as automodel_cli.recipes.sft.SFTRecipe, got {path!r}"
        raise ConfigError(message, code="invalid_target")
    allowed = (*OWN, *THIRD_PARTY, *trust)
    if not inside(path, allowed):
        raise _outside(path, allowed)
    if any(part.startswith("_") for part in path.split(".")):
        raise ConfigError(f"{path} is private: names must not begin with an underscore", code="invalid_target")
    target = _walk(path)
    if not isinstance(target, (type, types.FunctionType, types.BuiltinFunctionType)):
        raise ConfigError(f"{path} is not a class but {_kind(target)}", code="invalid_target")
    real = f"{target.__module__}.{target.__qualname__}"
    if not inside(real, allowed):
        raise ConfigError(f"{path} is {real}, which is outside the allowed packages", code="untrusted_code")
    if not inside(real, trust):
        if not isinstance(target, type):
            raise ConfigError(f"{path} is a function. A config builds classes only", code="invalid_target")
        if inside(real, OWN) and not is_node(target):
            raise ConfigError(f"{path} is not a config class (a frozen dataclass)", code="invalid_target")
    return target


def is_node(target: object) -> bool:
    """Whether `target` is a config node of ours: a frozen dataclass."""
    return isinstance(target, type) and dataclasses.is_dataclass(target) and target.__dataclass_params__.frozen  # type: ignore[attr-defined]


def is_own(target: Callable[..., Any]) -> bool:
    """Whether `target` belongs to this project."""
    return inside(target.__module__, OWN)


def _outside(path: str, allowed: Sequence[str]) -> ConfigError:
    top = path.split(".")[0]
    message = f"{path} is outside the allowed packages"
    if top == "torch":
        message += f" ({', '.join(name for name in allowed if name.startswith('torch.'))})"
    node = _node_called(f"automodel_cli.{path}") if top in ("recipe", "recipes") else None
    if node is not None:
        return ConfigError(message, code="untrusted_code", fix=f"_target_={node}")
    near = difflib.get_close_matches(top, OWN, 1, 0.75)
    if near:
        return ConfigError(message, code="untrusted_code", fix=f"_target_={near[0]}{path[len(top) :]}")
    if top in sys.stdlib_module_names or top == "torch":
        return ConfigError(message, code="untrusted_code")
    return ConfigError(message, code="untrusted_code", fix=f"--trust-package {top}   (if you trust its code)")


def _walk(path: str) -> object:
    """Import module by module, then read one attribute. A module reached under an alias is rejected."""
    parts = path.split(".")
    target: object = _import(parts[0], path)
    for i, part in enumerate(parts[1:], start=1):
        if not isinstance(target, types.ModuleType):
            raise ConfigError(f"{path} is not supported: {'.'.join(parts[:i])} is not a module", code="invalid_target")
        here = ".".join(parts[: i + 1])
        inner = vars(target).get(part)
        if isinstance(inner, types.ModuleType) and inner.__name__ != here:
            raise ConfigError(f"{path} is an alias: {here} is the module {inner.__name__}", code="invalid_target")
        if inner is None or isinstance(inner, types.ModuleType):
            # A lazy module (PEP 562) may provide the name although its dict does not contain it.
            inner = _import(here, path) if _exists(here) else getattr(target, part, None)
        if inner is None:
            raise _no_such(path, target, part, parts[:i])
        target = inner
    return target


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _import(module: str, path: str) -> types.ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        if inside(missing, OWN):
            raise  # a bug of ours: keep the traceback
        message = f"{path} needs the package {missing}, which is not installed"
        raise ConfigError(message, code="missing_package", fix=f"pip install {missing}") from error
    except Exception as error:
        if inside(module, OWN):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.filename}:{frame.lineno}"
        message = f"{path} cannot be imported, {where}: {type(error).__name__}: {error}"
        raise ConfigError(message, code="import_failed") from error


def _no_such(path: str, module: types.ModuleType, part: str, parents: Sequence[str]) -> ConfigError:
    names = [name for name, value in vars(module).items() if isinstance(value, type) and not name.startswith("_")]
    near = difflib.get_close_matches(part, names, 1, 0.6)
    target = _node_called(path) or (".".join([*parents, near[0]]) if near else None)
    fix = f"_target_={target}" if target else None
    return ConfigError(f"{path} does not exist: {'.'.join(parents)} has no {part}", code="invalid_target", fix=fix)


def _node_called(path: str) -> str | None:
    """Return the module path of a bundled node with the last name of `path`, for moved nodes and misspelled paths. If
    several nodes have that name: the nearest path. Files are read and not imported."""
    name = path.rpartition(".")[2]
    if not inside(path, OWN):
        return None
    node = re.compile(rf"^@dataclass\(.*frozen=True.*\)\nclass {name}\b", re.MULTILINE)
    matches = []
    for package in OWN:
        root = Path(importlib.import_module(package).__path__[0])
        for file in sorted({*root.rglob("*.py"), *(root / "recipes").rglob("*.py")}):  # a link in a checkout
            if node.search(file.read_text(encoding="utf-8")):
                parts = (package, *file.relative_to(root).with_suffix("").parts, name)
                matches.append(".".join(part for part in parts if part != "__init__"))
    public = [other for other in matches if "._" not in other]
    return max(public, key=lambda other: difflib.SequenceMatcher(None, path, other).ratio(), default=None)


def _kind(found: object) -> str:
    return "a module" if isinstance(found, types.ModuleType) else f"an object of type {type(found).__name__}"
