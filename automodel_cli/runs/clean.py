"""Find and remove files of finished runs that are no longer needed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from automodel_cli.runs.index import RunEntry, folder_size
from automodel_cli.runs.lock import hold

EXPORTS = "exports"
"""Folder of a run that holds the exports of chosen checkpoints, by the checkpoint's name."""
_LEFTOVER = re.compile(r"step-\d{6,}\.(tmp|old)-.*|best\.tmp-.*")


@dataclass(frozen=True)
class Removal:
    """One folder that may go: why, and how many bytes."""

    run: RunEntry
    path: Path
    why: str
    size: int


def removable(run: RunEntry, *, last_checkpoint: bool = False, empty: bool = False) -> list[Removal]:
    """Return the removable files of a run that is not active: unfinished and damaged checkpoints, complete ones that
    are neither the newest nor the best, and exports of selected checkpoints. With `last_checkpoint`: all checkpoints,
    if the final export exists. With `empty`: the folder of a run without a step.
    """
    if run.state in ("running", "queued"):
        return []
    if empty and not run.step and not run.checkpoints.complete() and not (run.folder / "export").exists():
        return [Removal(run, run.folder, "it never took a step", folder_size(run.folder))]
    return [Removal(run, path, why, folder_size(path)) for path, why in _checkpoints(run, last_checkpoint)]


def _checkpoints(run: RunEntry, last_checkpoint: bool) -> Iterator[tuple[Path, str]]:
    folder = run.checkpoints
    if not folder.path.is_dir():
        return
    for path in sorted(folder.path.iterdir()):
        if _LEFTOVER.fullmatch(path.name):
            yield path, "left by a run that was killed"
        elif path.name.endswith(".damaged"):
            yield path, "damaged"
    complete, best = folder.complete(), folder.best()
    exported = (run.folder / "export").is_dir()
    for path in complete:
        if last_checkpoint and exported:
            yield path, "the export is there"
        elif path != complete[-1] and (best is None or path.resolve() != best):
            yield path, "neither the newest nor the best"
        elif (again := run.folder / EXPORTS / path.name).is_dir():
            yield again, "the export of a checkpoint that stays: commands write it again"


def remove(removals: list[Removal]) -> None:
    """Remove them under the run's lock. Raises RunError if a run has started since."""
    for removal in removals:
        release = hold(removal.run.folder)
        try:
            shutil.rmtree(removal.path)
            best = removal.run.checkpoints.path / "best"
            if best.is_symlink() and not best.exists():
                best.unlink()
        finally:
            release()
