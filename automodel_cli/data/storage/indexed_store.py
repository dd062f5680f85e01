"""Cache entries for token files: where documents and packed rows are in the files. The tokens stay there.

`IndexedTokens` has the interface of `TokenStore` that packing reads, `IndexedStore` that of `PackedStore`. Every token
after the first of a piece is a label.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from automodel_cli.data.packing import Packed
from automodel_cli.data.row_errors import Rejected
from automodel_cli.data.storage.checksums import Checksum
from automodel_cli.data.token_files.reader import open_token_file, token_ids
from automodel_cli.data.token_files.token_file import TokenFile

_CHUNK = 1 << 24


@dataclass(frozen=True)
class IndexedTokens:
    """Documents of the token files of one dataset.

    Attributes:
        folder: the cache entry.
        meta: contents of `meta.json`, with the counts of `TokenStore.meta`.
        files: index of the file of each document, int32.
        starts: first token of each document in its file, int64.
        lengths: tokens of each document, int64.
    """

    folder: Path
    meta: dict[str, Any]
    files: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray

    @classmethod
    def open(cls, folder: Path) -> IndexedTokens:
        """Memory-map a complete entry."""
        meta = json.loads((folder / "meta.json").read_text())
        return cls(folder, meta, *(_map(folder, name) for name in ("files", "starts", "lengths")))

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.lengths)

    @property
    def num_used_rows(self) -> int:
        """Number of documents: each is a row."""
        return len(self.lengths)

    def row_numbers(self) -> np.ndarray:
        """Return the index of each document."""
        return np.arange(len(self.lengths))

    def rejected(self) -> list[Rejected]:
        """Return no row."""
        return []


def write_index(
    folder: Path,
    paths: Sequence[Path],
    *,
    delimiters: Sequence[int],
    special_ids: Collection[int],
    meta: dict[str, object],
) -> None:
    """Write the documents of token files into an empty folder. Reads all tokens once, for the largest id.

    Args:
        delimiters: see `open_token_file`.
        special_ids: ids of special tokens, for the statistics of document ends.
        meta: further values of `meta.json`.
    """
    opened = [open_token_file(path, delimiters) for path in paths]
    lengths = np.concatenate([file.lengths for file in opened])
    numbers = np.repeat(np.arange(len(opened), dtype=np.int32), [len(file.lengths) for file in opened])
    np.save(folder / "files.npy", numbers)
    np.save(folder / "starts.npy", np.concatenate([file.starts for file in opened]))
    np.save(folder / "lengths.npy", lengths)
    lasts = np.concatenate([file.ids[file.starts + file.lengths - 1] for file in opened])
    ends, counts = np.unique(lasts[np.isin(lasts, list(special_ids))], return_counts=True)
    counted = {
        "kind": "documents",
        "is_text": True,
        "format": ", ".join(dict.fromkeys(file.format for file in opened)),
        "masked_by": "none, every token is trained",
        "num_rows": len(lengths),
        "num_rejected": 0,
        "num_turns": len(lengths),
        "turn_ends": sorted(zip(ends.tolist(), counts.tolist(), strict=True), key=lambda pair: -pair[1]),
        "ends_trained": int(counts.sum()),
        "special_choice": "keep",
        "special_tokens": 0,
        "special_rows": 0,
        "unrolled": {},
        "unused": [],
        "names": [],
        "largest": max(_largest(file) for file in opened),
    }
    (folder / "meta.json").write_text(json.dumps({**meta, **counted}))


def _largest(file: TokenFile) -> tuple[int, str]:
    """Return the largest token of a file, and its place."""
    best, at = -1, 0
    # In chunks, so that a file of billions of tokens is not loaded at once.
    for first in range(0, len(file.ids), _CHUNK):
        chunk = np.asarray(file.ids[first : first + _CHUNK])
        place = int(chunk.argmax())
        if int(chunk[place]) > best:
            best, at = int(chunk[place]), first + place
    return best, f"{file.path.name}, token {at:,}"


@dataclass(frozen=True)
class IndexedStore:
    """Packed rows of token files. Attributes as in `PackedStore`; piece p begins at token `starts[p]` of its file."""

    meta: dict[str, Any]
    ids: Sequence[np.ndarray]
    files: np.ndarray
    starts: np.ndarray
    offsets: np.ndarray
    row_offsets: np.ndarray
    lines: np.ndarray
    num_label_tokens: np.ndarray
    roles: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int8))
    margins: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))

    @classmethod
    def open(cls, folder: Path, paths: Sequence[Path]) -> IndexedStore:
        """Memory-map a complete entry and its token files."""
        meta = json.loads((folder / "meta.json").read_text())
        names = ("files", "starts", "offsets", "row_offsets", "lines", "num_label_tokens")
        ids = [token_ids(path) for path in paths]
        arrays = {name: _map(folder, name) for name in names}
        return cls(meta=meta, ids=ids, **arrays)

    @property
    def kind(self) -> str:
        """`documents`."""
        return "documents"

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.row_offsets) - 1

    @property
    def content(self) -> str:
        """Hash of the files and of the places of all pieces."""
        return str(self.meta["content"])

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `PackedStore.row`."""
        pieces = range(int(self.row_offsets[number]), int(self.row_offsets[number + 1]))
        bounds = np.asarray(self.offsets[pieces.start : pieces.stop + 1])
        bounds = bounds - bounds[0]
        starts, lengths = self.starts[pieces.start : pieces.stop].tolist(), np.diff(bounds).tolist()
        files = self.files[pieces.start : pieces.stop].tolist()
        parts = [self.ids[f][a : a + n] for f, a, n in zip(files, starts, lengths, strict=True)]
        mask = np.ones(int(bounds[-1]), np.uint8)
        # The last token of a piece has no next token in it.
        mask[bounds[1:] - 1] = 0
        return np.concatenate(parts), mask, bounds

    def largest(self) -> tuple[int, str]:
        """See `PackedStore.largest`. Of the whole files."""
        token, place = self.meta["largest"]
        return int(token), str(place)

    def shown(self, piece: int) -> list[Any]:
        """Return no picture."""
        return []


def write_indexed(folder: Path, source: IndexedTokens, packed: Packed, *, meta: dict[str, Any]) -> None:
    """Write the places of packed rows."""
    pieces = packed.pieces
    offsets = np.concatenate([[0], np.cumsum(pieces.length)]).astype(np.int64)
    first_of_file = np.searchsorted(source.files, np.arange(len(source.meta["files"])))
    files = np.asarray(source.files[pieces.document])
    labels = np.append(0, np.cumsum(pieces.length - 1))
    content = Checksum()
    content.update(source.folder.name.encode())  # the hash of the files
    columns = {
        "files": files,
        "starts": source.starts[pieces.document] + pieces.start,
        "offsets": offsets,
        "row_offsets": packed.row_offsets,
        "lines": pieces.document - first_of_file[files] + 1,
        "num_label_tokens": np.diff(labels[packed.row_offsets]),
    }
    for name, values in columns.items():
        np.save(folder / f"{name}.npy", values)
        content.update(np.ascontiguousarray(values).view(np.uint8).data)
    header = {"files": source.meta["files"], "content": content.hexdigest(), "largest": source.meta["largest"]}
    (folder / "meta.json").write_text(json.dumps({**meta, **header}))


def _map(folder: Path, name: str) -> np.ndarray:
    values: np.ndarray = np.load(folder / f"{name}.npy", mmap_mode="r")
    return values
