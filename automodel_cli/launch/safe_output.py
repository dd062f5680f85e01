"""Output streams that survive a closed terminal, a broken pipe and a full disk."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path
from typing import Any, TextIO

_GONE = (errno.EIO, errno.EPIPE, errno.EBADF, errno.ENXIO, errno.ESTALE, errno.ENOTCONN, errno.ECONNRESET)
"""Errors of a lost reader: a closed terminal returns EIO, a pipe without a reader EPIPE."""

_log: Path | None = None
_before: tuple[TextIO | None, TextIO | None] | None = None


def open_missing() -> None:
    """Open the null device in place of closed standard descriptors, so that no other file gets their numbers."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "w", closefd=False))


def outlive_readers() -> None:
    """Make `sys.stdout` and `sys.stderr` survive their readers until `restore`."""
    global _before
    if _before is None:
        _before = (sys.stdout, sys.stderr)
        sys.stdout, sys.stderr = (_Lasting(stream) for stream in _before)


def restore_streams() -> None:
    """Restore the streams that `outlive_readers` replaced."""
    global _before, _log
    if _before is not None:
        for name, before in zip(("stdout", "stderr"), _before, strict=True):
            if not getattr(getattr(sys, name), "_is_replaced", False):
                setattr(sys, name, before)
    _before = _log = None


def continue_in(path: Path) -> None:
    """Write output to this file if the terminal or pipe is lost. By default it is discarded."""
    global _log
    _log = path


def urgent(text: str) -> None:
    """Write to stderr from a signal handler: unbuffered and without `print`, which is not reentrant."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


def flush() -> None:
    """Flush both streams before the process ends. A failure here must not change the exit code."""
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            _point_elsewhere(descriptor, None)


class _Lasting:
    """A text stream whose `write` and `flush` never raise OSError."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._is_replaced = stream, False
        with contextlib.suppress(AttributeError, ValueError, OSError):
            stream.reconfigure(errors="backslashreplace")  # models may write characters that the terminal cannot encode

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            if self._replaced(error):
                self.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._replaced(error)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def _replaced(self, error: OSError) -> bool:
        """Return whether the reader is lost and the stream was redirected. The old buffer is discarded, because it may
        hold text that it failed to write."""
        if error.errno not in _GONE or self._is_replaced:
            return False
        descriptor = self._stream.fileno()
        _point_elsewhere(descriptor, _log, error.strerror)
        self._stream = os.fdopen(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False)
        self._is_replaced = True
        return True


def _point_elsewhere(descriptor: int, path: Path | None, why: str | None = None) -> None:
    """Redirect a file descriptor of the process, including the output of C libraries, to a file."""
    target = None
    if path is not None:
        with contextlib.suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
            target = os.open(path, flags, 0o644)
            os.write(target, f"the output continues here: {why}\n".encode())
    if target is None:
        target = os.open(os.devnull, os.O_WRONLY)
    os.dup2(target, descriptor)
    os.close(target)
