"""One run writes into a folder at a time."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Callable
from pathlib import Path

from automodel_cli.config.errors import RunError


def hold(folder: Path) -> Callable[[], None]:
    """Keep every other run out of `folder` until the returned function is called, or this process ends however it may.

    Two runs in one folder would remove each other's checkpoints and mix their rows. Raises RunError where another one
    holds it. A file system without locks admits all. OSError where the folder cannot be written.
    """
    file = (folder / ".lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise RunError(
            f"{folder} is in use: {holder} trains in it",
            keys=("checkpoint.resume",),
            fix="wait for it or end it; a run of its own beside it: run_name=another-name checkpoint.resume=null",
        ) from None
    except OSError:  # no locks here
        return file.close
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file.close
