"""Open files that may be compressed with gzip or Zstandard. Damage is an EOFError at the place where reading stops."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path
from typing import IO, Any, cast

from automodel_cli.data.sources.remote_path import arrow_source

SUFFIXES = (".gz", ".zst")
DAMAGE = (gzip.BadGzipFile, EOFError, zlib.error)
"""Exceptions of a damaged file."""


def plain_name(path: Path) -> str:
    """Return the file name without the suffix of a compression."""
    return path.name.removesuffix(".gz").removesuffix(".zst")


def tool_of(path: Path) -> str:
    """Return the program that checks (`-t`) and decompresses (`-dc`) such files."""
    return "zstd" if path.name.endswith(".zst") else "gzip"


def open_file(path: Path) -> IO[bytes]:
    """Open for reading. The result has `peek`."""
    if path.name.endswith(".gz"):
        return cast(IO[bytes], gzip.open(path.open("rb"), "rb"))
    if path.name.endswith(".zst"):
        return io.BufferedReader(_Zstandard(path), 1 << 20)
    return path.open("rb")


class _Zstandard(io.RawIOBase):
    """Decompressed bytes, by pyarrow, which `datasets` brings."""

    def __init__(self, path: Path):
        import pyarrow

        self._stream: Any = pyarrow.input_stream(arrow_source(path), compression="zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except OSError as error:
            raise EOFError(str(error)) from error
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()
