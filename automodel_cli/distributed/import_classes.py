"""Import classes by their dotted paths."""

from __future__ import annotations

import importlib

from automodel_cli.config.errors import ConfigError


def import_classes_from_paths(paths: list[str]) -> list[type]:
    """Return the classes, `["torch.optim.AdamW"]` -> `[AdamW]`. Raises ConfigError if a path is not a class."""
    return [_import_class(path) for path in paths]


def _import_class(path: str) -> type:
    if not isinstance(path, str) or not all(path.split(".")) or "." not in path:
        raise ConfigError(f"{path!r} must be the import path of a class: package.module.Class", code="invalid_value")
    module_name, _, name = path.rpartition(".")
    try:
        value = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # A module may raise any error while it is imported.
        raise ConfigError(f"{path} cannot be imported: {error}", code="import_failed") from error
    if not isinstance(value, type):
        raise ConfigError(f"{path} must be a class, not {type(value).__name__}", code="wrong_type")
    return value
