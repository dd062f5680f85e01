"""Lock of a run folder: only one run may write to it."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from automodel_cli.config.errors import RunError
from automodel_cli.config.security.safe_files import open_own

_FILE = ".lock"
_SECONDS = 0.3
"""Checking whether a run is active holds the lock for a moment."""


def hold(folder: Path) -> Callable[[], None]:
    """Keep every other run out of `folder` until the returned function is called or this process ends.

    Two runs in one folder would remove each other's checkpoints and mix their rows. Raises RunError if another run
    holds the lock, and OSError if the folder is not writable. A file system without locks admits all.
    """
    file = open_own(folder / _FILE, "a+")
    try:
        _take(file.fileno())
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise RunError(
            f"{folder} is in use: {holder} is training in it",
            code="run_locked",
            keys=("checkpoint.resume",),
            fix="wait for that run or stop it, or start a separate run: run_name=another-name checkpoint.resume=null",
        ) from None
    except OSError:  # no locks here
        return file.close
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file.close


def is_held(folder: Path) -> bool | None:
    """Return whether a run is active in `folder`. None if its file system has no locks."""
    try:
        with open(os.open(folder / _FILE, os.O_RDONLY | os.O_NONBLOCK)) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released when the file is closed
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False


def _take(descriptor: int) -> None:
    """Acquire a lock. Raises BlockingIOError if a run holds it, and OSError without support for locks."""
    last = time.monotonic() + _SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > last:
                raise
            time.sleep(0.02)
