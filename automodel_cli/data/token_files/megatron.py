"""Read and write Megatron's indexed datasets: tokens in `.bin`, sequences and documents in `.idx`.

Layout of `.idx` (megatron/core/datasets/indexed_dataset.py), little-endian: the magic, version 1 (uint64), the code of
the dtype (uint8), the number of sequences and of document bounds (uint64 each), the length of each sequence (int32),
its first byte in `.bin` (int64), and the bounds of documents as indices of sequences (int64, from 0 to the number of
sequences). Multimodal files end with a mode for each sequence (int8).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from automodel_cli.config.errors import DataError
from automodel_cli.data.token_files.detection import INDEX_SUFFIX
from automodel_cli.data.token_files.token_file import TokenFile, damaged, mapped

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_FLOATS = (6, 7)


def token_ids(path: Path) -> np.ndarray:
    """Map the tokens of a `.bin` file. Raises DataError for an index of another format."""
    return mapped(path, _read_header(path.with_suffix(INDEX_SUFFIX))[0])


def _read_header(index: Path) -> tuple[np.dtype, int, int]:
    """Return the dtype, the number of sequences and the number of document bounds."""
    with index.open("rb") as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise damaged(index, "is not an index of Megatron: it does not begin with MMIDIDX")
    _, version, code, num_sequences, num_bounds = _HEADER.unpack(head)
    if version != 1 or code not in _DTYPES:
        what = "holds floating-point numbers, not tokens" if code in _FLOATS else f"has version {version}, dtype {code}"
        raise DataError(f"{index} {what}", code="unsupported_file_type", fix="write it again with megatron-core")
    return np.dtype(_DTYPES[code]), num_sequences, num_bounds


def read(path: Path) -> TokenFile:
    """Open the dataset of a `.bin` file. Documents without tokens are left out. Raises DataError if it is damaged."""
    index = path.with_suffix(INDEX_SUFFIX)
    dtype, num_sequences, num_bounds = _read_header(index)
    needed = _HEADER.size + 12 * num_sequences + 8 * num_bounds
    num_bytes = index.stat().st_size
    if num_bytes not in (needed, needed + num_sequences):  # with modes
        raise damaged(index, f"has {num_bytes:,} bytes, but its header requires {needed:,}")
    if num_bytes > needed and num_sequences:
        raise DataError(
            f"{index} is a multimodal dataset", code="unsupported_file_type", fix="use a dataset of text tokens"
        )
    fields = np.memmap(index, np.uint8, mode="r", offset=_HEADER.size) if num_bounds else np.zeros(0, np.uint8)
    lengths, firsts, bounds = _split(fields, num_sequences, num_bounds)
    ids = mapped(path, dtype)
    starts, sizes = _documents(index, lengths.astype(np.int64), firsts // ids.dtype.itemsize, bounds)
    if len(starts) and int((starts + sizes).max()) > len(ids):
        raise damaged(path, f"has {len(ids):,} tokens, but its index ends at {int((starts + sizes).max()):,}")
    return TokenFile(path, "Megatron tokens", ids, starts[sizes > 0], sizes[sizes > 0])


def _split(fields: np.ndarray, num_sequences: int, num_bounds: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return lengths, first bytes and bounds. They are not aligned in the file, so they are copied."""
    a, b = 4 * num_sequences, 12 * num_sequences
    parts = (fields[:a], np.int32), (fields[a:b], np.int64), (fields[b : b + 8 * num_bounds], np.int64)
    lengths, firsts, bounds = (np.frombuffer(part.tobytes(), dtype) for part, dtype in parts)
    return lengths, firsts, bounds


def _documents(
    index: Path, lengths: np.ndarray, firsts: np.ndarray, bounds: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return first token and length of each document. Its sequences must follow each other in the file."""
    rising = len(bounds) > 0 and bounds[0] == 0 and bounds[-1] == len(lengths) and (np.diff(bounds) >= 0).all()
    if not rising or (lengths < 0).any() or (firsts < 0).any():
        raise damaged(index, "is inconsistent: its document bounds do not cover its sequences")
    ends = np.append(0, np.cumsum(lengths))
    apart = np.flatnonzero(firsts[1:] != firsts[:-1] + lengths[:-1]) + 1
    if not np.isin(apart, bounds).all():
        raise damaged(index, "is inconsistent: the sequences of a document do not follow each other")
    sizes = np.diff(ends[bounds])
    starts = np.append(firsts, 0)[bounds[:-1]]
    return starts.astype(np.int64), sizes.astype(np.int64)


def write(path: Path, documents: Iterable[np.ndarray], dtype: np.dtype) -> tuple[int, int]:
    """Write documents as `.bin` and `.idx`, one sequence each. Return the numbers of documents and tokens."""
    code = next(code for code, name in _DTYPES.items() if name == dtype.name)
    lengths = []
    with path.open("wb") as file:
        for ids in documents:
            file.write(ids.astype(dtype).tobytes())
            lengths.append(len(ids))
    sizes = np.array(lengths, np.int32)
    firsts = np.append(0, np.cumsum(sizes, dtype=np.int64))[:-1] * dtype.itemsize
    with path.with_suffix(INDEX_SUFFIX).open("wb") as file:
        file.write(_HEADER.pack(_MAGIC, 1, code, len(sizes), len(sizes) + 1))
        for values in (sizes, firsts.astype(np.int64), np.arange(len(sizes) + 1, dtype=np.int64)):
            file.write(values.tobytes())
    return len(sizes), int(sizes.sum(dtype=np.int64))
