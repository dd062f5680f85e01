"""Write files in a folder that other users may write to: no symbolic link of theirs leads a write elsewhere."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import uuid
from pathlib import Path
from typing import IO, Any

from automodel_cli.config.errors import RunError

_FLAGS = {
    "w": os.O_WRONLY | os.O_CREAT,
    "a": os.O_WRONLY | os.O_CREAT | os.O_APPEND,
    "a+": os.O_RDWR | os.O_CREAT | os.O_APPEND,
}


def replace(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file atomically through a temporary file with a random name. Replaces a link, never its target."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(temporary, flags, 0o666), "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def open_own(path: Path, mode: str, *, binary: bool = False) -> IO[Any]:
    """Open a file to write (`w`, `a` or `a+`). Raises RunError for a link, a pipe or a device, else OSError."""

    def opener(name: str, flags: int) -> int:
        return _regular(path, mode)

    if binary:
        return open(path, f"{mode}b", opener=opener)
    return open(path, mode, encoding="utf-8", opener=opener)


def _regular(path: Path, mode: str) -> int:
    try:
        # O_NONBLOCK: a pipe without a reader must not block the run. It does not affect regular files.
        descriptor = os.open(path, _FLAGS[mode] | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _refused(path, "a symbolic link" if error.errno == errno.ELOOP else "a pipe") from error
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise _refused(path, "a second name of another file" if stat.S_ISREG(status.st_mode) else "no regular file")
    if mode == "w":
        os.truncate(descriptor, 0)
    return descriptor


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file. Raises OSError otherwise, because reading a pipe or a device may never
    end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "is no regular file", str(path))
        return file.read()


def _refused(path: Path, what: str) -> RunError:
    return RunError(
        f"{path} is {what}. A run writes to regular files only",
        code="unsafe_file",
        fix=f"rm {path}   (somebody else can write into this folder: see docs/guides/security.md)",
    )
