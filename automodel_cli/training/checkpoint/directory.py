"""The checkpoint folder: names, atomic publication, integrity, retention and the `best` link. Does not import torch.

States of a checkpoint folder:

    step-NNNNNN.tmp-*      being written. Removed at the next save if a run was killed.
    step-NNNNNN            complete. Files are synced to disk before the rename.
    step-NNNNNN.old-*      being removed. Renamed first, so that a final name never denotes a partial checkpoint.
    step-NNNNNN.damaged    failed verification. Never removed automatically.

`meta.json` contains size and XXH3-128 hash of every file and a hash of itself. Later damage, for example a truncated
copy, is therefore detected.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from automodel_cli.config.errors import RunError
from automodel_cli.config.fix_syntax import word
from automodel_cli.config.security.safe_files import replace
from automodel_cli.data.storage.checksums import Checksum, content_hash
from automodel_cli.training.early_stopping import Goal

META = "meta.json"
_SEAL = "xxh3"
_WHOLE = re.compile(r"step-(\d{6,})")
_LEFTOVER = re.compile(r"step-\d{6,}\.(tmp|old)-.*")


class FileNote(TypedDict):
    """Size in bytes and hash of one file, as stored in `meta.json`."""

    bytes: int
    xxh3: str


class CheckpointMeta(TypedDict):
    """Values of `meta.json`. `extra` and `metrics` are the arguments of `Checkpointer.save`."""

    step: int
    world_size: int
    optimizer: str
    scheduler: dict[str, Any]
    extra: dict[str, Any]
    metrics: dict[str, float]
    files: dict[str, FileNote]


def step_of(checkpoint: Path) -> int | None:
    """Return the step in the name of a checkpoint folder, or None if it is not the name of a complete checkpoint."""
    match = _WHOLE.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def read_meta(checkpoint: Path) -> CheckpointMeta:
    """Read `meta.json`.

    Raises:
        RunError: `checkpoint` is not a complete checkpoint, or its metadata is damaged.
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
        meta = json.loads((checkpoint / META).read_bytes())
        seal = meta.pop(_SEAL)
    except (ValueError, KeyError, AttributeError, TypeError):
        raise damaged(checkpoint, f"{META} cannot be read") from None
    if seal != _seal(meta):
        raise damaged(checkpoint, f"{META} does not match its checksum")
    read: CheckpointMeta = meta
    return read


def damaged(checkpoint: Path, what: str) -> RunError:
    """Return the error of a damaged checkpoint, with a command that renames it."""
    return RunError(
        f"checkpoint {checkpoint} is damaged: {what}",
        code="checkpoint_incomplete",
        keys=("checkpoint.resume",),
        fix=f"mv {word(checkpoint)} {word(f'{checkpoint}.damaged')}   (then the previous checkpoint is the newest)",
    )


def damage(checkpoint: Path, files: dict[str, FileNote], names: Sequence[str]) -> list[str]:
    """Return one sentence for each of the named files that is missing, unreadable or changed. Reads all bytes."""
    problems = []
    for name in names:
        path, note = checkpoint / name, files[name]
        try:
            size = path.stat().st_size
            if size != note["bytes"]:
                problems.append(f"{name} has {size:,} bytes, not {note['bytes']:,}")
            elif content_hash(path) != note["xxh3"]:
                problems.append(f"{name} does not match its checksum (XXH3-128 differs)")
        except FileNotFoundError:
            problems.append(f"{name} is missing")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
    return problems


class CheckpointDir:
    """All checkpoints of one run. Only rank 0 may call methods that write."""

    def __init__(self, path: Path, goal: Goal | None = None):
        self.path, self._goal = path, goal or Goal()

    def complete(self) -> list[Path]:
        """Return the complete checkpoints, oldest first, without the `best` link and unfinished folders."""
        if not self.path.is_dir():
            return []
        folders = [(step_of(p), p) for p in self.path.iterdir() if p.is_dir() and not p.is_symlink()]
        return [path for step, path in sorted((s, p) for s, p in folders if s is not None)]

    def latest(self) -> Path | None:
        """Return the complete checkpoint of the highest step."""
        complete = self.complete()
        return complete[-1] if complete else None

    def best(self) -> Path | None:
        """Return the complete checkpoint with the best validation metric so far."""
        link = self.path / "best"
        return link.resolve() if link.is_symlink() and link.exists() else None

    def set_aside(self, checkpoint: Path) -> Path:
        """Rename a damaged checkpoint and return its new path."""
        aside = checkpoint.with_name(f"{checkpoint.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(checkpoint, aside)
        return aside

    def clear_leftovers(self) -> None:
        """Remove unfinished folders of killed attempts."""
        for path in self.path.iterdir():
            if _LEFTOVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)

    def publish(self, written: Path, final: Path, meta: CheckpointMeta) -> None:
        """Publish the folder `written` as the checkpoint `final`: write the metadata, sync to disk, rename."""
        _write_meta(written / META, meta)
        _sync_folder(written)
        old = None
        if final.exists():  # an attempt that resumed from an earlier step had saved this step
            old = final.with_name(f"{final.name}.old-{os.getpid()}")
            os.rename(final, old)
        os.rename(written, final)
        _sync_folder(self.path)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def amend(self, checkpoint: Path, metrics: dict[str, float], extra: Mapping[str, object]) -> None:
        """Add metrics and extra values to the metadata of a complete checkpoint."""
        meta = read_meta(checkpoint)
        meta["metrics"] |= metrics
        meta["extra"] |= extra
        _write_meta(checkpoint / META, meta)
        _sync_folder(checkpoint)
        self.link_if_best(checkpoint, metrics.get(self._goal.metric))

    def link_if_best(self, checkpoint: Path, value: float | None) -> None:
        """Point `best` to `checkpoint` if its validation metric is better than the current best."""
        if not self._goal.better(value, None):
            return
        best = self.best()
        if best is not None and best != checkpoint.resolve():
            try:
                present = read_meta(best)["metrics"].get(self._goal.metric)
            except RunError:  # damaged, so it does not count as the best
                present = None
            if not self._goal.better(value, present):
                return
        temporary = self.path / f"best.tmp-{uuid.uuid4().hex}"
        temporary.symlink_to(checkpoint.name)
        os.replace(temporary, self.path / "best")

    def prune(self, keep: int | None) -> None:
        """Remove all checkpoints except the newest `keep` and the best. None keeps all."""
        if keep is None:
            return
        best = self.best()
        for path in self.complete()[:-keep]:
            if best is None or path.resolve() != best:
                doomed = path.with_name(f"{path.name}.old-{os.getpid()}")
                os.rename(path, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def _seal(meta: dict[str, object]) -> str:
    """Return the hash of the metadata values, independent of their formatting in the file."""
    digest = Checksum()
    digest.update(json.dumps(meta, sort_keys=True).encode())
    return digest.hexdigest()


def _write_meta(path: Path, meta: CheckpointMeta) -> None:
    plain = json.loads(json.dumps(meta))  # tuples and integer keys as they are read back
    replace(path, json.dumps({**plain, _SEAL: _seal(plain)}, indent=1), durable=True)


def _sync_folder(path: Path) -> None:
    """Sync the entries of a folder to disk. A rename is durable only afterwards."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
