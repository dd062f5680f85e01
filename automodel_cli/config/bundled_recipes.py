"""Location and descriptions of the bundled configs. Imports only the standard library."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_SHOWN_AS: dict[Path, Path] = {}


def conf_dir() -> Path:
    """Return the folder of the bundled configs: `automodel_cli/conf` in a wheel, `conf/` in a checkout."""
    installed = _PACKAGE / "conf"
    return installed if installed.is_dir() else _PACKAGE.parent / "conf"


def recipe_names() -> list[str]:
    """Return the bundled configs that `-c NAME` accepts, sorted. Files in group folders are options, not recipes."""
    return sorted(path.stem for path in conf_dir().glob("*.yaml"))


def recipe_path(name: str) -> Path:
    """Return the file of a bundled config. The caller has checked that it exists."""
    return conf_dir() / f"{name}.yaml"


@contextlib.contextmanager
def own_copy(path: Path, content: bytes) -> Iterator[Path]:
    """A copy of a config file that no other user can change while it is read. Messages name the original."""
    with tempfile.TemporaryDirectory(prefix="automodel-") as folder:
        copy = Path(folder).resolve() / path.name
        copy.write_bytes(content)
        _SHOWN_AS[copy] = path
        try:
            yield copy
        finally:
            del _SHOWN_AS[copy]


def display(path: Path) -> str:
    """Return the name of a config file for messages: `conf/...` if bundled, relative if below the working directory."""
    path = _SHOWN_AS.get(path, path)
    for base, prefix in ((conf_dir(), "conf/"), (Path.cwd(), "")):
        if path.is_relative_to(base):
            return prefix + path.relative_to(base).as_posix()
    return str(path)


@dataclass(frozen=True)
class Description:
    """Summary and hardware of a recipe, from the comment block at its top."""

    summary: str
    """First line of the block."""
    fits_on: str
    """Line `Fits on:` of the block. Empty if there is none."""


def describe_recipe(name: str) -> Description:
    """Read the leading comment block of a bundled recipe."""
    summary = fits_on = ""
    for line in recipe_path(name).read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        text = line.lstrip("# ").rstrip()
        if text.startswith("Fits on:"):
            fits_on = text.removeprefix("Fits on:").strip()
        elif not summary and not text.startswith("@package"):
            summary = text
    return Description(summary, fits_on)
