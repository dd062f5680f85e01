"""One file of tokens with the boundaries of its documents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from automodel_cli.config.errors import DataError


@dataclass(frozen=True)
class TokenFile:
    """Tokens of a file, and its documents.

    Attributes:
        path: the `.bin` file.
        format: name of the format.
        ids: all tokens, memory-mapped, (tokens,).
        starts: first token of each document, int64 (documents,).
        lengths: tokens of each document, at least 1, int64 (documents,).
    """

    path: Path
    format: str
    ids: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    def document(self, number: int) -> np.ndarray:
        """Return the tokens of a document."""
        start = int(self.starts[number])
        return self.ids[start : start + int(self.lengths[number])]


def damaged(path: Path, reason: str) -> DataError:
    """Return the error for a file that contradicts its header."""
    return DataError(f"{path} {reason}", code="damaged_file", fix="write or download the file again")


def mapped(path: Path, dtype: np.dtype, offset: int = 0) -> np.ndarray:
    """Map the tokens of a file from a byte on. Raises DataError if the size is not a multiple of a token."""
    num_bytes = path.stat().st_size - offset
    if num_bytes % dtype.itemsize:
        raise damaged(path, f"has {num_bytes:,} bytes of tokens, which is not a multiple of {dtype.itemsize}")
    if not num_bytes:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r", offset=offset)
