"""Token shards that a run reads while later ones are prepared (`data.start_after`).

The folder of the shards has `shards.json`, the list of all shards, from the start of the preparation on. Every process
that prepares locks a file of its own, `preparing-HOST-PID.lock`. The kernel releases the lock when the process dies.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Event

from automodel_cli.config.errors import DataError
from automodel_cli.config.security import safe_files
from automodel_cli.data.preparation.token_shards import TokenShards, shard_name
from automodel_cli.data.sources.spans import Span
from automodel_cli.data.storage.cache import damage
from automodel_cli.data.storage.memmap_store import TokenStore

LISTED = "shards.json"
_LOCK = ".lock"
PATIENCE = 120.0
"""Seconds without a preparing process after which a run stops to wait. Above the time for which network file systems
remember that a file does not exist (60 s)."""
POLL = 0.5


@dataclass(frozen=True)
class ListedShard:
    """A shard of the list: its first rows as `file@begin`, for messages, and the bytes of its rows."""

    place: str
    size: int


def list_shards(shards: TokenShards) -> None:
    """Write the list of all shards, before the first is prepared."""
    shards.folder.mkdir(parents=True, exist_ok=True)
    listed = [(_place(shards.source.files, spans), shards.source.num_bytes_of(spans)) for spans in shards.spans]
    safe_files.replace(shards.folder / LISTED, json.dumps(listed))


def _place(files: Sequence[str], spans: Sequence[Span]) -> str:
    if not spans:
        return "@0"
    last = f"-{files[spans[-1].file]}" if len(spans) > 1 else ""
    return f"{files[spans[0].file]}{last}@{spans[0].begin}"


@contextmanager
def preparing(folder: Path) -> Iterator[None]:
    """Tell runs that this process prepares shards of the folder."""
    path = folder / f"preparing-{socket.gethostname()}-{os.getpid()}{_LOCK}"
    hidden = path.with_suffix(".new")
    with safe_files.open_own(hidden, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        hidden.replace(path)  # locked before a run sees it
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def is_being_prepared(folder: Path) -> bool:
    """Return whether a process prepares shards of this folder."""
    return any(map(_is_locked, folder.glob(f"preparing-*{_LOCK}")))


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # removed by its process
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, because many ranks ask at once
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


class KeptShards:
    """The shards of one dataset as a run reads them. It waits for shards that are not prepared yet.

    Args:
        folder: folder of the shards.
        name: the dataset in messages.
        show: receives a line when it waits.
    """

    def __init__(self, folder: Path, name: str, show: Callable[[str], None]):
        self.folder, self.name, self._show = folder, name, show
        self._is_closed = Event()
        self.store: Callable[[int], TokenStore] = lru_cache(maxsize=16)(self._store)
        """Waits for a shard, and returns its documents."""

    def listed(self) -> list[ListedShard]:
        """Wait for the list of the shards."""
        self._wait(self.folder / LISTED, f"the preparation of {self.name}")
        return [ListedShard(*of) for of in json.loads((self.folder / LISTED).read_text())]

    def wait(self, number: int) -> Path:
        """Wait until a shard is prepared, and return its folder. Raises DataError if nobody prepares it."""
        folder = self.folder / shard_name(number)
        self._wait(folder, f"shard {number} of {self.name}")
        return folder

    def num_ready(self, total: int) -> int:
        """Return how many shards are prepared."""
        return sum((self.folder / shard_name(number)).is_dir() for number in range(total))

    def close(self) -> None:
        """End the waits of all threads."""
        self._is_closed.set()

    def _store(self, number: int) -> TokenStore:
        folder = self.wait(number)
        if (reason := damage(folder)) is not None:
            raise DataError(
                f"shard {number} of {self.name} is damaged: {folder}: {reason}",
                code="damaged_file",
                keys=("data.start_after",),
                fix="automodel data prepare with the same config, then resume the run",
            )
        return TokenStore.open(folder)

    def _wait(self, path: Path, what: str) -> None:
        latest, is_told = time.monotonic(), False
        while not path.exists():
            if is_being_prepared(self.folder):
                latest = time.monotonic()
            elif self._is_closed.is_set() or time.monotonic() - latest > PATIENCE:
                raise self._stopped(what)
            if not is_told:
                self._show(f"waiting for {what}")
                is_told = True
            if self._is_closed.wait(POLL):
                raise self._stopped(what)

    def _stopped(self, what: str) -> DataError:
        return DataError(
            f"{what} does not exist, and no process prepares it (data.start_after): {self.folder}",
            code="preparation_stopped",
            keys=("data.start_after",),
            fix="automodel data prepare with the same config, then start or resume the run",
        )
