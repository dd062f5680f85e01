"""A test is found where its code is: `tests/unit/FOLDER/test_MODULE.py`, or `test_MODULE_ASPECT.py`, of a module of
`automodel_cli/FOLDER`."""

from __future__ import annotations

from pathlib import Path

UNIT = Path(__file__).parents[1]
PACKAGE = UNIT.parents[1] / "automodel_cli"
ABOUT_MORE_THAN_ONE_MODULE = {
    "objectives/test_vectors.py",  # one table of published numbers for all objectives
}


def test_unit_tests_mirror_the_package() -> None:
    lost = []
    for path in UNIT.rglob("test_*.py"):
        folder, name = path.relative_to(UNIT).parent, path.stem.removeprefix("test_")
        if folder == Path("repository") or f"{folder}/{path.name}" in ABOUT_MORE_THAN_ONE_MODULE:
            continue
        modules = [module.stem for module in (PACKAGE / folder).glob("*.py")] if folder.parts else []
        if not any(name == module or name.startswith(f"{module}_") for module in modules):
            lost.append(f"tests/unit/{folder}/{path.name}: automodel_cli/{folder} has no module of that name")
    assert not lost, "\n".join(lost)
