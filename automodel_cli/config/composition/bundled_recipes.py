"""Location and descriptions of the bundled configs. Imports only the standard library."""

from __future__ import annotations

import contextlib
import difflib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import word

_PACKAGE = Path(__file__).resolve().parents[2]
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


def locate(conf: str) -> Path:
    """The absolute path of `-c CONF`. Raises ConfigError with the nearest bundled name or file."""
    path = Path(conf)
    if path.suffix == ".yml":
        fix = f"mv {word(conf)} {word(path.with_suffix('.yaml'))}"
        raise ConfigError(f"{conf} must end in .yaml", code="unsupported_file_type", keys=("--conf",), fix=fix)
    if path.suffix == ".yaml" or "/" in conf:
        if path.is_file() and path.suffix == ".yaml":
            return path.resolve()
        if path.with_suffix(".yaml").is_file():
            fix = f"-c {word(path.with_suffix('.yaml'))}"
            raise ConfigError(f"{conf} must end in .yaml", code="missing_file", keys=("--conf",), fix=fix)
        if path.parent == Path("conf") and path.suffix == ".yaml" and path.stem in recipe_names():
            return recipe_path(path.stem)  # as messages and the docs call it, from wherever it is typed
        known = f"-c {path.stem}   (bundled)" if path.stem in recipe_names() else None
        suggestion = known or _nearest_file(path)
        raise ConfigError(f"config file {conf} does not exist", code="missing_file", keys=("--conf",), fix=suggestion)
    if conf in recipe_names():
        return recipe_path(conf)
    if Path(f"{conf}.yaml").is_file():
        message = f"{conf} is not a bundled recipe, but the file {conf}.yaml exists"
        raise ConfigError(message, code="unknown_name", keys=("--conf",), fix=f"-c {word(conf)}.yaml")
    near = difflib.get_close_matches(conf, recipe_names(), 1, 0.5)
    raise ConfigError(
        f"{conf} is not a bundled recipe",
        code="unknown_name",
        keys=("--conf",),
        fix=f"-c {near[0]}" if near else "automodel recipes ls   (lists them)",
    )


def _nearest_file(path: Path) -> str | None:
    siblings = [str(p) for p in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(str(path), siblings, 1, 0.6)
    return f"-c {word(near[0])}" if near else None
