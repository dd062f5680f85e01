"""Files of a file system of fsspec that are read in place."""

from __future__ import annotations

import io
from pathlib import Path, PosixPath
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


class RemotePath(PosixPath):
    """A path of an fsspec file system. Only its name and `open` are used."""

    fs: AbstractFileSystem
    key: str

    @classmethod
    def of(cls, fs: AbstractFileSystem, key: str) -> RemotePath:
        """Return the path of a file as `fs` names it."""
        path = cls(key)
        path.fs, path.key = fs, key
        return path

    def open(self, *args: object, **options: object) -> IO[bytes]:  # type: ignore[override]
        """Open for reading bytes, with `peek`."""
        return io.BufferedReader(self.fs.open(self.key, "rb"), 1 << 20)


def arrow_source(path: Path) -> object:
    """Return what pyarrow reads: a file name, or a remote file."""
    return path.open("rb") if isinstance(path, RemotePath) else str(path)
