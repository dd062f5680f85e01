"""The folder of checkpoints: names, what counts as one, atomic publication, keep-k and the best link. Torch-free.

A checkpoint is whole if and only if its folder has the final name `step-NNNNNN`: it is written as `step-NNNNNN.tmp-*`,
forced to disk and renamed. It is removed by renaming it first, so a final name never stands for half a checkpoint.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from automodel_cli.config.errors import RunError

META = "meta.json"
_WHOLE = re.compile(r"step-(\d{6,})")
_LEFTOVER = re.compile(r"step-\d{6,}\.(tmp|old)-.*")


def step_of(checkpoint: Path) -> int | None:
    """The step that a folder's name stands for; None when it is not the final name of a checkpoint."""
    match = _WHOLE.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """What rank 0 wrote beside the tensors: step, metrics, world_size, optimizer, scheduler, extra.

    Raises RunError when `checkpoint` is not a whole checkpoint.
    """
    if step_of(checkpoint) is None or not (checkpoint / META).is_file():
        raise RunError(
            f"{checkpoint} is not a whole checkpoint: those are named step-NNNNNN and hold {META}",
            keys=("checkpoint.resume",),
            fix="checkpoint.resume=auto",
        )
    return json.loads((checkpoint / META).read_text())


class CheckpointDir:
    """All checkpoints of one run. Methods that change something are called by rank 0 only."""

    def __init__(self, path: Path):
        self.path = path

    def whole(self) -> list[Path]:
        """Whole checkpoints, oldest first. The `best` link and unfinished folders are not among them."""
        if not self.path.is_dir():
            return []
        found = [(step_of(p), p) for p in self.path.iterdir() if p.is_dir() and not p.is_symlink()]
        return [path for step, path in sorted((s, p) for s, p in found if s is not None)]

    def latest(self) -> Path | None:
        """The whole checkpoint of the highest step."""
        whole = self.whole()
        return whole[-1] if whole else None

    def best(self) -> Path | None:
        """The whole checkpoint with the lowest validation loss so far."""
        link = self.path / "best"
        return link.resolve() if link.is_symlink() and link.exists() else None

    def clear_leftovers(self) -> None:
        """Remove what an attempt that was killed left behind."""
        for path in self.path.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def publish(self, written: Path, final: Path, meta: dict[str, Any]) -> None:
        """Make the folder `written` the checkpoint `final`: metadata, force to disk, rename."""
        text = json.dumps(meta, indent=1, allow_nan=True)
        with open(written / META, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(written)
        old = None
        if final.exists():  # the step was saved before, by an attempt that this run went back behind
            old = final.with_name(f"{final.name}.old-{os.getpid()}")
            os.rename(final, old)
        os.rename(written, final)
        _sync_folder(self.path)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def link_if_best(self, checkpoint: Path, val_loss: float | None) -> None:
        """Point `best` to `checkpoint` if its validation loss is lower than that of the present best."""
        if val_loss is None or val_loss != val_loss:
            return
        best = self.best()
        if best is not None and best != checkpoint.resolve():
            present = read_meta(best)["metrics"].get("val_loss")
            if present is not None and present <= val_loss:
                return
        temporary = self.path / f"best.tmp-{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(checkpoint.name)
        os.replace(temporary, self.path / "best")

    def prune(self, keep: int | None) -> None:
        """Remove all but the newest `keep` and the best."""
        if keep is None:
            return
        best = self.best()
        for path in self.whole()[:-keep]:
            if best is None or path.resolve() != best:
                doomed = path.with_name(f"{path.name}.old-{os.getpid()}")
                os.rename(path, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    """Force a folder's entries to disk; a rename is durable only after that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
