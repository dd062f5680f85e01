"""Cache entries for tokenized documents and packed rows: flat memory-mapped arrays with offsets, without padding.

A token entry (`TokenStore`) contains the documents of one dataset in the order of its rows. A packed entry
(`PackedStore`) contains the same tokens in the order of the packed rows, so that a batch reads contiguous memory.

Example: the documents [5, 6, 7] and [5, 6, 8, 9] of one conversation share 2 tokens and are stored as::

    ids      5 6 7 8 9      offsets  0 3 5
    shared   0 2            document 1 = the first 2 tokens of document 0, then ids[3:5]
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from automodel_cli.data.pictures.storage import PictureTable
from automodel_cli.data.row_errors import Rejected, read_rejected


def no_values() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class TokenStore:
    """The usable documents of one dataset, in the order of its rows.

    Attributes:
        folder: the cache entry.
        meta: contents of `meta.json`: files, dtype, kind and counts.
        ids: all stored tokens, (tokens,).
        label_mask: 1 if the *next* token of the document is trained, uint8, (tokens,).
        offsets: document d stores the tokens `offsets[d]:offsets[d + 1]`, int64, (documents + 1,).
        files: index into `meta["files"]` of each document.
        lines: line of each document in its file.
        rows: row number of each document. Documents with the same number are turns of one conversation.
        shared: document d begins with the first `shared[d]` tokens of document d - 1. They are not trained.
        splits: length of the first of two concatenated documents. 0 for single documents.
        judgements: 1 for a good, 0 for a bad response, -1 if not rated.
        margins: margin of each pair.
        parts, part_counts: tokens of each document of the groups, and number of documents of each group.
        targets: target of each labeled text, fp32, (documents, outputs), or the index of its class, (documents, 1).
        classes: class of each token of labeled words, int16, (tokens,). -1 for none.
    """

    folder: Path
    meta: dict[str, Any]
    ids: np.ndarray
    label_mask: np.ndarray
    offsets: np.ndarray
    files: np.ndarray
    lines: np.ndarray
    rows: np.ndarray
    shared: np.ndarray
    splits: np.ndarray = field(default_factory=no_values)
    judgements: np.ndarray = field(default_factory=no_values)
    margins: np.ndarray = field(default_factory=no_values)
    parts: np.ndarray = field(default_factory=no_values)
    part_counts: np.ndarray = field(default_factory=no_values)
    targets: np.ndarray = field(default_factory=no_values)
    classes: np.ndarray = field(default_factory=no_values)

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """Memory-map a complete entry."""
        meta = json.loads((folder / "meta.json").read_text())
        names = ["offsets", "files", "lines", "rows", "shared", "splits", "judgements", "margins"]
        names += ["parts", "part_counts", "targets", "classes"]
        arrays = [_load(folder, name) for name in names]
        return cls(folder, meta, _map(folder, "ids", meta["dtype"]), _map(folder, "label_mask", "uint8"), *arrays)

    @property
    def kind(self) -> str:
        """`documents`, `pairs`, `judged`, `labeled` or `groups`."""
        return str(self.meta.get("kind", "documents"))

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1

    @property
    def num_used_rows(self) -> int:
        """Number of rows with at least one document."""
        return int(self.meta["num_rows"]) - int(self.meta["num_rejected"])

    def row_numbers(self) -> np.ndarray:
        """Return for each document the index of its row among the used rows, int64, (documents,)."""
        return np.cumsum(np.diff(self.rows, prepend=self.rows[:1]) != 0)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each document, int64, (documents,)."""
        lengths: np.ndarray = np.diff(self.offsets) + self.shared
        return lengths

    def document(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and the label mask of one document, with its shared beginning."""
        shared, own = int(self.shared[number]), slice(*self.offsets[number : number + 2].tolist())
        if not shared:
            return self.ids[own], self.label_mask[own]
        # Example: three documents of one conversation, 1 2 3, then 1 2 4 5, then 1 2 4 6. Stored are the tokens 1 2 3 4
        # 5 6 with `shared` 0, 2, 3 and `offsets` 0 3 5 6. Document 2 is 6 after the first 3 tokens of document 1, of
        # which 2 are in document 0. A long conversation with a document per turn takes linear space.
        ids = np.concatenate([*self._beginning(number - 1, shared), self.ids[own]])
        return ids, np.concatenate([np.zeros(shared, np.uint8), self.label_mask[own]])

    def _beginning(self, number: int, length: int) -> list[np.ndarray]:
        """Return the first `length` tokens of a document as a list of arrays.

        Follows the chain of shared beginnings back to the document that stores them.
        """
        pieces = []
        while length:
            shared, start = int(self.shared[number]), int(self.offsets[number])
            if length > shared:
                pieces.append(self.ids[start : start + length - shared])
            # The rest of the beginning is in the document before.
            number, length = number - 1, min(shared, length)
        return pieces[::-1]

    def is_trained(self, number: int, start: int, stop: int) -> bool:
        """Whether tokens `start:stop` of a document contain a label. The label of the last token is outside."""
        first = int(self.offsets[number] - self.shared[number])
        return bool(self.label_mask[max(first + start, self.offsets[number]) : first + stop - 1].any())

    def rejected(self) -> list[Rejected]:
        """Read the rejected rows from disk."""
        return read_rejected(self.folder / "rejected.jsonl") if self.meta["num_rejected"] else []


@dataclass(frozen=True)
class PackedStore:
    """Packed rows of one dataset, ready to be batched.

    The last token of a piece has no label. If `kind` is `pairs` or `judged`, pieces 2i and 2i + 1 belong together.

    Attributes:
        meta: contents of `meta.json`.
        ids: all tokens in the order of the rows, (tokens,).
        label_mask: 1 if the next token is trained, uint8, (tokens,).
        offsets: piece p has the tokens `offsets[p]:offsets[p + 1]`, int64, (pieces + 1,).
        row_offsets: row r has the pieces `row_offsets[r]:row_offsets[r + 1]`, int64, (rows + 1,).
        files: index into `meta["files"]` of each piece.
        lines: line of each piece in its file.
        num_label_tokens: number of trained tokens of each row, (rows,).
        roles: 1 for a chosen or good response, 0 for a rejected or bad one, -1 for one that is only scored.
            Groups: 0 for the query, 1 for its passage, 2 for a negative.
        margins: margin of the pair of each piece. Empty if no pair of the dataset has a margin.
        targets, classes: as in `TokenStore`, for each piece and for each token.
        picture_offsets, picture_index: piece p shows `picture_index[picture_offsets[p]:...]` of `pictures`.
        pictures: contents and sizes, None without pictures.
    """

    meta: dict[str, Any]
    ids: np.ndarray
    label_mask: np.ndarray
    offsets: np.ndarray
    row_offsets: np.ndarray
    files: np.ndarray
    lines: np.ndarray
    num_label_tokens: np.ndarray
    roles: np.ndarray = field(default_factory=no_values)
    margins: np.ndarray = field(default_factory=no_values)
    targets: np.ndarray = field(default_factory=no_values)
    classes: np.ndarray = field(default_factory=no_values)
    picture_offsets: np.ndarray = field(default_factory=no_values)
    picture_index: np.ndarray = field(default_factory=no_values)
    pictures: PictureTable | None = None

    @classmethod
    def open(cls, folder: Path) -> PackedStore:
        """Memory-map a complete entry."""
        meta = json.loads((folder / "meta.json").read_text())
        names = ["offsets", "row_offsets", "files", "lines", "num_label_tokens", "roles", "margins"]
        names += ["targets", "classes"]
        names += ["picture_offsets", "picture_index"] if meta.get("picture_table") else []
        arrays = {name: _load(folder, name) for name in names}
        table = PictureTable.open(folder.parent / meta["picture_table"]) if meta.get("picture_table") else None
        ids, mask = _map(folder, "ids", meta["dtype"]), _map(folder, "label_mask", "uint8")
        return cls(meta=meta, ids=ids, label_mask=mask, pictures=table, **arrays)

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ids, label mask (1 if the next token has loss) and document bounds, from 0 to the row length."""
        bounds = self.offsets[self.row_offsets[number] : self.row_offsets[number + 1] + 1]
        a, b = int(bounds[0]), int(bounds[-1])
        return self.ids[a:b], self.label_mask[a:b], bounds - a

    def largest(self) -> tuple[int, str]:
        """Return the largest token id, and the file and line of a document that holds it. -1 without tokens."""
        if not len(self.ids):
            return -1, ""
        place = int(self.ids.argmax())
        piece = int(np.searchsorted(self.offsets, place, side="right")) - 1
        return int(self.ids[place]), f"{self.meta['files'][int(self.files[piece])]}:{int(self.lines[piece])}"

    def shown(self, piece: int) -> list[tuple[PictureTable, int]]:
        """Return the pictures of a piece, in order, each as its table and its number there."""
        if self.pictures is None:
            return []
        places = slice(*self.picture_offsets[piece : piece + 2].tolist())
        return [(self.pictures, int(number)) for number in self.picture_index[places]]

    def distinct_pictures(self) -> np.ndarray:
        """Return indices into `picture_index` such that each row shows each of its pictures once."""
        of_piece = np.repeat(np.arange(self.num_rows), np.diff(self.row_offsets))
        rows = np.repeat(of_piece, np.diff(self.picture_offsets))
        _, first = np.unique(np.stack([rows, self.picture_index]), axis=1, return_index=True)
        distinct: np.ndarray = np.sort(first)
        return distinct

    def patches_of_pictures(self) -> np.ndarray:
        """Return the number of patches of each picture of each piece, int64. 0: no grid, so unknown."""
        if self.pictures is None:
            return no_values()
        patches: np.ndarray = self.pictures.rows["grid"].astype(np.int64).prod(1)[self.picture_index]
        return patches

    @property
    def kind(self) -> str:
        """`documents`, `pairs`, `judged`, `labeled` or `groups`."""
        return str(self.meta.get("kind", "documents"))

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return len(self.row_offsets) - 1

    @property
    def content(self) -> str:
        """Hash of everything that training reads: tokens, label masks, boundaries, roles and margins."""
        return str(self.meta["content"])


def _load(folder: Path, name: str) -> np.ndarray:
    values: np.ndarray = np.load(folder / f"{name}.npy")
    return values


def _map(folder: Path, name: str, dtype: str) -> np.ndarray:
    path = folder / f"{name}.bin"
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")
