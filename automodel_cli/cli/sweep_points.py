"""Runs of a sweep: their overrides, names, folders and states."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import override

_FILE = "sweep.json"
_OWN = ("run_name", "output_dir", "checkpoint.resume")
_MOST = 1000


@dataclass(frozen=True)
class Point:
    """One run of a sweep: its swept values, all its overrides (including its folder), and the folder."""

    swept: tuple[str, ...]
    overrides: tuple[str, ...]
    folder: Path


def grid_points(folder: Path, overrides: tuple[str, ...]) -> list[Point]:
    """Raise ConfigError if no value is swept, or if a swept key is set by the sweep itself."""
    from automodel_cli.config.composition import hydra_adapter

    check_own_keys(folder, overrides)
    try:
        points = hydra_adapter.points(overrides)
    except ValueError as error:
        raise ConfigError(
            f"{error} must be a list of values or a range",
            code="invalid_override",
            keys=(str(error).partition("=")[0],),
            origin=f"{error} (command line)",
            fix="--optuna 20" if "interval(" in str(error) else None,
        ) from error
    except hydra_adapter.HydraException as error:
        message = f"the overrides cannot be parsed: {str(error).splitlines()[0]}"
        raise ConfigError(message, code="invalid_override") from error
    if len(points) == 1:
        fix = "automodel finetune llm, or a list: seed=0,1"
        raise ConfigError("the sweep has one run because each key has one value", code="empty_value", fix=fix)
    if len(points) > _MOST:
        raise ConfigError(f"the sweep has {len(points):,} runs. The limit is {_MOST:,}", code="limit_exceeded")
    return [point_of(folder, number, swept, everything) for number, (swept, everything) in enumerate(points)]


def point_of(folder: Path, number: int, swept: Sequence[str], everything: Sequence[str]) -> Point:
    name = _name(number, swept)
    own = (override("output_dir", str(folder)), override("run_name", name), override("checkpoint.resume", "auto"))
    places = [text for words in own for text in shlex.split(words)]
    return Point(tuple(swept), (*everything, *places), folder / name)


def check_own_keys(folder: Path, overrides: Sequence[str]) -> None:
    for text in overrides:
        if (key := text.lstrip("+").partition("=")[0]) in _OWN:
            raise ConfigError(
                f"{key} cannot be set in a sweep, which gives each run a separate folder",
                code="unsupported_combination",
                keys=(key,),
                fix=f"--name {folder.name}",
            )


def _name(number: int, swept: Sequence[str]) -> str:
    """`003 lr=1e-05 seed=1` as a name of a folder."""
    words = [f"{text.partition('=')[0].rpartition('.')[2]}={short_value(text.partition('=')[2])}" for text in swept]
    return re.sub(r"[^\w.,+=-]+", "_", f"{number:03}-{','.join(words)}")[:120]


def short_value(value: str) -> str:
    """Four digits of a number that has many."""
    return f"{float(value):.4g}" if re.fullmatch(r"-?\d+\.\d{6,}(e-?\d+)?", value) else value


def check_same_sweep(folder: Path, conf: str, overrides: tuple[str, ...]) -> None:
    """Raise if the folder holds another sweep, whose finished runs would be mixed with this one's."""
    try:
        before = json.loads((folder / _FILE).read_bytes())
    except (OSError, ValueError):
        return
    if before != {"conf": conf, "overrides": list(overrides)}:
        command = " ".join([before.get("conf", "?"), *before.get("overrides", [])])
        message = f"{folder} belongs to another sweep: {command}"
        raise ConfigError(message, code="resume_conflict", keys=("--name",), fix=f"--name {folder.name}-2")


def remember(folder: Path, conf: str, overrides: tuple[str, ...]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _FILE).write_text(json.dumps({"conf": conf, "overrides": list(overrides)}, indent=1) + "\n")


def state_of(point: Point) -> str:
    from automodel_cli.runs.index import RunEntry

    return RunEntry(point.folder).state if (point.folder / "config.yaml").is_file() else "new"
