"""The folder of checkpoints: names, what counts as one, atomic publication, keep-k and the best link. Torch-free.

A checkpoint is whole if and only if its folder has the final name `step-NNNNNN`: it is written as `step-NNNNNN.tmp-*`,
forced to disk and renamed. It is removed by renaming it first, so a final name never stands for half a checkpoint.
What happens to it afterwards (a bad disk, a copy that was cut short) is noticed by size and hash of every file, which
its metadata holds, with a hash of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from automodel_cli.config.errors import RunError
from automodel_cli.config.fix_syntax import word
from automodel_cli.config.safe_files import replace
from automodel_cli.data.storage.checksums import Checksum, content_hash
from automodel_cli.training.early_stopping import Goal

META = "meta.json"
_SEAL = "xxh3"
_WHOLE = re.compile(r"step-(\d{6,})")
_LEFTOVER = re.compile(r"step-\d{6,}\.(tmp|old)-.*")


class FileNote(TypedDict):
    """What the metadata says of one file."""

    bytes: int
    xxh3: str


def step_of(checkpoint: Path) -> int | None:
    """The step that a folder's name stands for; None when it is not the final name of a checkpoint."""
    match = _WHOLE.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def read_meta(checkpoint: Path) -> dict[str, Any]:
    """What rank 0 wrote beside the tensors: step, metrics, world_size, optimizer, scheduler, extra, files.

    Raises RunError when `checkpoint` is not a whole checkpoint, or this file of it is not as it was written.
    """
    if step_of(checkpoint) is None or not checkpoint.is_dir():
        raise RunError(
            f"checkpoint.resume={checkpoint} is not a checkpoint: it must be a folder step-NNNNNN that contains {META}",
            code="no_checkpoint",
            keys=("checkpoint.resume",),
            fix="checkpoint.resume=auto",
        )
    if not (checkpoint / META).is_file():
        raise damaged(checkpoint, f"{META} is missing")
    try:
        meta: dict[str, Any] = json.loads((checkpoint / META).read_bytes())
        seal = meta.pop(_SEAL)
    except (ValueError, KeyError, AttributeError, TypeError):
        raise damaged(checkpoint, f"{META} cannot be read") from None
    if seal != _seal(meta):
        raise damaged(checkpoint, f"{META} does not match its checksum")
    return meta


def damaged(checkpoint: Path, what: str) -> RunError:
    """The user's error about a checkpoint that was whole once."""
    return RunError(
        f"checkpoint {checkpoint} is damaged: {what}",
        code="checkpoint_incomplete",
        keys=("checkpoint.resume",),
        fix=f"mv {word(checkpoint)} {word(f'{checkpoint}.damaged')}   (then the previous checkpoint is the newest)",
    )


def damage(checkpoint: Path, files: dict[str, FileNote], names: Sequence[str]) -> list[str]:
    """What is wrong with the named files of a checkpoint, a sentence each; reads all their bytes."""
    found = []
    for name in names:
        path, note = checkpoint / name, files[name]
        try:
            size = path.stat().st_size
            if size != note["bytes"]:
                found.append(f"{name} has {size:,} bytes, not {note['bytes']:,}")
            elif content_hash(path) != note["xxh3"]:
                found.append(f"{name} holds other bytes than were written (XXH3-128 differs)")
        except FileNotFoundError:
            found.append(f"{name} is missing")
        except OSError as error:
            found.append(f"{name} cannot be read: {error.strerror}")
    return found


class CheckpointDir:
    """All checkpoints of one run. Methods that change something are called by rank 0 only."""

    def __init__(self, path: Path, goal: Goal | None = None):
        self.path, self._goal = path, goal or Goal()

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
        """The whole checkpoint with the best validation so far."""
        link = self.path / "best"
        return link.resolve() if link.is_symlink() and link.exists() else None

    def set_aside(self, checkpoint: Path) -> Path:
        """Take a damaged checkpoint out of the count, without removing anything; returns its new place."""
        aside = checkpoint.with_name(f"{checkpoint.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(checkpoint, aside)
        return aside

    def clear_leftovers(self) -> None:
        """Remove what an attempt that was killed left behind."""
        for path in self.path.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def publish(self, written: Path, final: Path, meta: dict[str, Any]) -> None:
        """Make the folder `written` the checkpoint `final`: metadata, force to disk, rename."""
        _write_meta(written / META, meta)
        _sync_folder(written)
        old = None
        if final.exists():  # the step was saved before, by an attempt that this run went back behind
            old = final.with_name(f"{final.name}.old-{os.getpid()}")
            os.rename(final, old)
        os.rename(written, final)
        _sync_folder(self.path)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def amend(self, checkpoint: Path, metrics: dict[str, float], extra: dict[str, Any]) -> None:
        """Add to what a whole checkpoint says of itself."""
        meta = read_meta(checkpoint)
        meta["metrics"] |= metrics
        meta["extra"] |= extra
        _write_meta(checkpoint / META, meta)
        _sync_folder(checkpoint)
        self.link_if_best(checkpoint, metrics.get(self._goal.metric))

    def link_if_best(self, checkpoint: Path, value: float | None) -> None:
        """Point `best` to `checkpoint` if its validation is better than that of the present best."""
        if not self._goal.better(value, None):
            return
        best = self.best()
        if best is not None and best != checkpoint.resolve():
            try:
                present = read_meta(best)["metrics"].get(self._goal.metric)
            except RunError:  # damaged: no longer the best of anything
                present = None
            if not self._goal.better(value, present):
                return
        temporary = self.path / f"best.tmp-{uuid.uuid4().hex}"
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


def _seal(meta: dict[str, Any]) -> str:
    """Of the values, not of their spelling."""
    digest = Checksum()
    digest.update(json.dumps(meta, sort_keys=True).encode())
    return digest.hexdigest()


def _write_meta(path: Path, meta: dict[str, Any]) -> None:
    plain = json.loads(json.dumps(meta))  # as it will be read: no tuples, no keys that are numbers
    replace(path, json.dumps({**plain, _SEAL: _seal(plain)}, indent=1), durable=True)


def _sync_folder(path: Path) -> None:
    """Force a folder's entries to disk; a rename is durable only after that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
