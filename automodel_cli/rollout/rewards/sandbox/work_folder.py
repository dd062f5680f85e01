"""Temporary folder of a sandbox, whose content untrusted code made."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator


@contextlib.contextmanager
def work_folder() -> Iterator[str]:
    """A temporary folder that is removed however its contents were made."""
    folder = tempfile.mkdtemp(prefix="sandbox-")
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: str) -> None:
    """Remove a tree of any depth. Contents of a folder move up before it is removed, so that paths stay short."""
    with contextlib.suppress(OSError):
        number = 0
        while entries := list(os.scandir(folder)):
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, 0o700)
                for name in os.listdir(entry.path):
                    inner = f"{entry.path}/{name}"
                    if os.path.isdir(inner) and not os.path.islink(inner):
                        os.chmod(inner, 0o700)  # a folder without the right to write cannot move
                        number += 1
                        os.rename(inner, f"{folder}/.{number}")
                    else:
                        os.unlink(inner)
                os.rmdir(entry.path)
        os.rmdir(folder)
