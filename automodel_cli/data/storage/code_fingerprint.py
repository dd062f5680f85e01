"""Fingerprint of a custom object for cache keys: its values and the files of its code."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

from automodel_cli.config.errors import DataError


def fingerprint(instance: object) -> str:
    """Hash the class name, the values of the instance, and every file next to the class's module that it imports
    directly or indirectly. An edit of one of them changes the key. Installed packages are not included.

    Raises DataError for a class that is not defined in a file.
    """
    kind = type(instance)
    module = sys.modules[kind.__module__]
    if not str(getattr(module, "__file__", None)).endswith(".py"):
        raise DataError(
            f"{kind.__qualname__} is not defined in a file, so changes to its code cannot be detected",
            code="not_supported",
            keys=("data.format",),
        )
    digest = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__} {_values(instance)}".encode())
    for name, content in sorted(_sources(kind.__module__, Path(str(module.__file__))).items()):
        digest.update(f"\0{name}\0".encode() + content)
    return digest.hexdigest()


def _values(instance: object) -> str:
    if dataclasses.is_dataclass(instance):
        values = {field.name: getattr(instance, field.name) for field in dataclasses.fields(instance)}
    else:
        values = getattr(instance, "__dict__", {})
    return json.dumps(values, sort_keys=True, default=repr)


def _sources(module: str, file: Path) -> dict[str, bytes]:
    """Return the content of the file and of the imported files under the same root, by module."""
    root = file.parents[module.count(".") + (file.name == "__init__.py")]
    installed = {Path(path) for path in sysconfig.get_paths().values()}
    top = module.partition(".")[0]
    sources: dict[str, bytes] = {}
    waiting = {module: file}
    while waiting:
        name, path = waiting.popitem()
        sources[name] = path.read_bytes()
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for imported in _imported(sources[name], package):
            if root in installed and imported.partition(".")[0] != top:
                continue  # another package in the same folder
            for inner in _prefixes(imported):
                if inner not in sources and (there := _file(root, inner)) is not None:
                    waiting[inner] = there
    return sources


def _imported(source: bytes, package: str) -> Iterator[str]:
    """Return the dotted names that a module imports, also inside functions. `from a import b` also gives `a.b`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else str(node.module)
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _prefixes(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[: i + 1]) for i in range(len(parts)))


def _file(root: Path, module: str) -> Path | None:
    path = root.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)
