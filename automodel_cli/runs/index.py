"""Index of run folders: state, progress and metrics of each run. Read-only."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.plain_text import visible
from automodel_cli.runs.lock import is_held
from automodel_cli.runs.run_record import read_record
from automodel_cli.training.checkpoint.directory import CheckpointDir
from automodel_cli.training.metrics_file import read_metrics

STATES = ("running", "finished", "failed", "interrupted", "queued", "unknown")
_JOB = "job.sbatch"


@dataclass(frozen=True)
class RunEntry:
    """One run folder. Files are read on first use and cached.

    `is_copy`: its records were downloaded and its lock is not visible, so its record determines whether it is active.
    """

    folder: Path
    is_copy: bool = False

    @property
    def name(self) -> str:
        return self.folder.name

    @cached_property
    def record(self) -> dict[str, Any]:
        """Record of the run (`runs/run_record.py`), or {} for runs without one."""
        return read_record(self.folder)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl, numbers only."""
        try:
            rows = read_metrics(self.folder / "metrics.jsonl")
        except OSError:
            return []
        return [{visible(key): value for key, value in row.items() if _is_shown(value)} for row in rows]

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """Its starts, oldest first."""
        attempts: list[dict[str, Any]] = self.record.get("attempts", [])
        return attempts

    @cached_property
    def state(self) -> str:
        """One of `STATES`. The lock shows an active run. A start that ended without a record has failed."""
        held = None if self.is_copy else is_held(self.folder)
        last = self.attempts[-1]["state"] if self.attempts else ""
        if held or (held is None and last == "running"):
            return "running"
        if last:
            return "failed" if last == "running" else last if last in STATES else "unknown"
        if (self.folder / "export").is_dir():
            return "finished"
        return "queued" if (self.folder / _JOB).is_file() and not self.rows else "unknown"

    @property
    def why(self) -> str:
        """Why it failed, as far as that is known."""
        if self.state != "failed":
            return ""
        return str(self.attempts[-1].get("error", "it ended without a word: killed, or its machine went down"))

    @property
    def recipe(self) -> str:
        return str(self.record.get("recipe", ""))

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return max((int(row["step"]) for row in self.rows), default=0)

    @property
    def num_steps(self) -> int | None:
        return self.record.get("num_steps")

    def last(self, key: str) -> float | None:
        """Return the newest finite value of a column, or None."""
        return next((row[key] for row in reversed(self.rows) if isinstance(row.get(key), (int, float))), None)

    @property
    def age(self) -> float:
        """Seconds since something was written."""
        files = (self.folder / name for name in ("metrics.jsonl", "run.json", "config.yaml"))
        return time.time() - max((file.stat().st_mtime for file in files if file.exists()), default=0.0)

    @property
    def seconds(self) -> float:
        """Time from start to end, of all starts that have ended."""
        spans = [(a["began"], a["ended"]) for a in self.attempts if a.get("ended") and a["began"]]
        return sum((datetime.fromisoformat(b) - datetime.fromisoformat(a)).total_seconds() for a, b in spans)

    def as_json(self) -> dict[str, Any]:
        """Return the state, the steps and the newest metrics."""
        metrics = {
            key: self.last(key) for key in ("loss", "val_loss", "reward", "val_accuracy") if self.last(key) is not None
        }
        return {
            "folder": str(self.folder),
            "recipe": self.recipe,
            "state": self.state,
            "step": self.step,
            "num_steps": self.num_steps,
            **metrics,
            "age_seconds": round(self.age),
        }

    @property
    def checkpoints(self) -> CheckpointDir:
        return CheckpointDir(self.folder / "checkpoints")


def _is_shown(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and -1e300 < value < 1e300)


def find_runs(folder: Path) -> list[RunEntry]:
    """The run in `folder`, or the runs below it (sweeps too), oldest first."""
    return oldest_first(_below(folder, depth=3))


def oldest_first(runs: Iterable[RunEntry]) -> list[RunEntry]:
    return sorted(runs, key=lambda run: -run.age)


def _below(folder: Path, depth: int) -> Iterator[RunEntry]:
    if (folder / "config.yaml").is_file():
        yield RunEntry(folder)
    elif depth and folder.is_dir() and os.access(folder, os.R_OK | os.X_OK):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                yield from _below(path, depth - 1)


def runs_named(names: Sequence[str]) -> list[RunEntry]:
    """Return the runs with these names or folders. A folder of runs stands for all of them. Raises ConfigError."""
    found = []
    for name in names:
        runs = find_runs(Path(name)) or find_runs(Path("runs") / name)
        if not runs:
            known = find_runs(Path("runs"))
            fix = str(known[-1].folder) if known else "automodel runs ls"
            raise ConfigError(f"{name} is not a run", code="run_not_found", fix=fix)
        found += runs
    return found


def folder_size(folder: Path) -> int:
    """Bytes of the files below `folder`, links not followed."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
