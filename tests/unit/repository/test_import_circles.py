"""No module of the packages imports itself through others, counting imports for types and inside functions too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("automodel_cli", "recipes")
ALLOWED: dict[tuple[str, str], str] = {}
"""(importer, imported) -> why this pair of modules may import each other. At most three."""


def modules(root: Path, packages: tuple[str, ...]) -> dict[str, Path]:
    """Return the files of the packages by module name."""
    files = [file for package in packages for file in sorted((root / package).rglob("*.py"))]
    named = {".".join(file.relative_to(root).with_suffix("").parts): file for file in files}
    return {name.removesuffix(".__init__"): file for name, file in named.items()}


def imports(module: str, file: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the known modules that a file imports, at any depth.

    `from p import m` is the module `p.m` where there is one, else `p`.
    """
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
            yield from (name for name in (name if name in known else base for name in names) if name in known)


def import_graph(root: Path, packages: tuple[str, ...]) -> dict[str, set[str]]:
    known = modules(root, packages)
    return {module: set(imports(module, file, known)) - {module} for module, file in known.items()}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Return the modules of one circle, each followed by one that it imports; empty without a circle."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_no_circle_of_imports() -> None:
    graph = import_graph(ROOT, PACKAGES)
    assert len(graph) > 400
    assert len(ALLOWED) <= 3
    for importer, imported in ALLOWED:
        assert importer in graph[imported], f"{imported} no longer imports {importer}: remove the pair from ALLOWED"
        graph[importer].remove(imported)
    assert circle(graph) == []


@pytest.mark.parametrize(
    "first",
    [
        "from p.b import B",
        "from p import b",
        "import p.b",
        "from .b import B",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.b import B",
        "def f():\n    from p.b import B",
    ],
)
def test_every_kind_of_import_counts(tmp_path: Path, first: str) -> None:
    (tmp_path / "p").mkdir()
    for name, text in (("__init__", ""), ("a", first), ("b", "from p.c import C"), ("c", "from p.a import A")):
        (tmp_path / "p" / f"{name}.py").write_text(text)
    assert sorted(set(circle(import_graph(tmp_path, ("p",))))) == ["p.a", "p.b", "p.c"]
    (tmp_path / "p" / "c.py").write_text("")
    assert circle(import_graph(tmp_path, ("p",))) == []
