"""Table of the pictures of a token entry: where each content is, and which documents show it.

Contents of files stay in their files. Other contents (base64, bytes of tables, pictures made in code) are copied into
the entry, once each. Reading verifies the hash, so that an edited file is noticed.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from automodel_cli.config.errors import RunError
from automodel_cli.data.picture import Picture
from automodel_cli.data.pictures.content import key_of

_ROW = np.dtype(
    [
        *(("key", "V16"), ("height", "i4"), ("width", "i4"), ("grid", "i4", (3,))),
        *(("path", "i4"), ("start", "i8"), ("length", "i8")),
    ]
)
_PATHS, _TABLE, _BYTES = "picture_paths.json", "pictures.npy", "pictures.bin"


class PictureWriter:
    """Collects the pictures of documents, each content once."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._rows: list[tuple[object, ...]] = []
        self._numbers: dict[bytes, int] = {}
        self._paths: list[list[object]] = []
        self._counts, self._splits, self._index = array("q"), array("q"), array("q")
        self._file = (folder / _BYTES).open("wb")

    def add(self, pictures: Sequence[Picture], num_first: int) -> None:
        """Append the pictures of the next document. `num_first`: of the first of two concatenated documents."""
        self._counts.append(len(pictures))
        self._splits.append(num_first)
        self._index.extend(self._number(picture) for picture in pictures)

    def watch(self, path: str) -> None:
        """Prepare the data again when this file of a rejected row changes."""
        self._paths.append([path, *_status(path)])

    def _number(self, picture: Picture) -> int:
        if picture.key not in self._numbers:
            self._numbers[picture.key] = len(self._rows)
            path, start, length = -1, 0, 0
            if picture.path is not None:
                path = len(self._paths)
                self.watch(picture.path)
            else:
                assert picture.data is not None, "a picture has a path or data"
                start, length = self._file.tell(), len(picture.data)
                self._file.write(picture.data)
            self._rows.append((picture.key, picture.height, picture.width, picture.grid, path, start, length))
        return self._numbers[picture.key]

    def save(self) -> None:
        """Write the table."""
        self._file.close()
        np.save(self._folder / _TABLE, np.array(self._rows, _ROW))
        np.save(self._folder / "picture_offsets.npy", np.concatenate([[0], np.cumsum(self._counts)]).astype(np.int64))
        np.save(self._folder / "picture_splits.npy", np.asarray(self._splits, np.int64))
        np.save(self._folder / "picture_index.npy", np.asarray(self._index, np.int64))
        (self._folder / _PATHS).write_text(json.dumps(self._paths))


@dataclass(frozen=True)
class PictureTable:
    """The pictures of one token entry.

    Attributes:
        rows: one record per content.
        paths: path, size and modification time of contents in files, and of unreadable pictures.
        offsets: document d shows the pictures `index[offsets[d]:offsets[d + 1]]`.
        splits: how many of them belong to the first of two concatenated documents.
    """

    folder: Path
    rows: np.ndarray
    paths: list[tuple[str, int, int]]
    offsets: np.ndarray
    splits: np.ndarray
    index: np.ndarray

    @classmethod
    def open(cls, folder: Path) -> PictureTable:
        """Read the table of a token entry."""
        names = ("pictures", "picture_offsets", "picture_splits", "picture_index")
        rows, *arrays = (np.load(folder / f"{name}.npy") for name in names)
        return cls(folder, rows, json.loads((folder / _PATHS).read_text()), *arrays)

    def changed(self) -> list[list[int]]:
        """Return size and modification time of all files, if any differs from what was read; else an empty list."""
        found = [list(_status(path)) for path, *_ in self.paths]
        return found if found != [[size, time] for _, size, time in self.paths] else []

    def size(self, number: int) -> tuple[int, int]:
        """Return height and width of a picture."""
        row = self.rows[number]
        return int(row["height"]), int(row["width"])

    def grid(self, number: int) -> list[int]:
        """Return the patches of a picture in time, height and width."""
        return list(map(int, self.rows[number]["grid"]))

    def content(self, number: int) -> bytes:
        """Return the bytes of a picture. Raises RunError if its file has changed since the data was prepared."""
        row = self.rows[number]
        if row["path"] < 0:
            with (self.folder / _BYTES).open("rb") as file:
                file.seek(int(row["start"]))
                return file.read(int(row["length"]))
        path = self.paths[int(row["path"])][0]
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise RunError(f"the picture {path} cannot be read: {error}", code="picture_changed") from error
        if key_of(data) != bytes(row["key"]):
            raise RunError(
                f"the picture {path} has changed since the data was prepared",
                code="picture_changed",
                fix="restore the file, or start a new run",
            )
        return data


@dataclass(frozen=True)
class PictureList:
    """Pictures outside a token entry, read as those of a `PictureTable`.

    Attributes:
        folder: any value that differs from those of other tables.
        grids: patches of each picture in time, height and width.
    """

    folder: Path
    pictures: tuple[Picture, ...]
    grids: tuple[tuple[int, int, int], ...]

    def size(self, number: int) -> tuple[int, int]:
        """Return height and width of a picture."""
        return self.pictures[number].height, self.pictures[number].width

    def grid(self, number: int) -> list[int]:
        """Return the patches of a picture in time, height and width."""
        return list(self.grids[number])

    def content(self, number: int) -> bytes:
        """Return the bytes of a picture. Raises RunError if its file cannot be read."""
        picture = self.pictures[number]
        try:
            return picture.content()
        except OSError as error:
            raise RunError(f"the picture {picture.path} cannot be read: {error}", code="picture_changed") from error


def _status(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except (OSError, ValueError):  # the latter: a null character in the path
        return -1, -1
    return status.st_size, status.st_mtime_ns


def of_pieces(table: PictureTable, documents: np.ndarray, *, halves: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return offsets and index of the pictures of pieces.

    Args:
        documents: number of the document of each piece.
        halves: two pieces in a row are the two documents that one document concatenates. Else a piece is a document.
    """
    starts, counts = table.offsets[documents], np.diff(table.offsets)[documents]
    if halves:
        firsts = table.splits[documents]
        starts[1::2] += firsts[1::2]
        counts[::2], counts[1::2] = firsts[::2], counts[1::2] - firsts[1::2]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    shift = np.repeat(starts - offsets[:-1], counts)
    return offsets, table.index[shift + np.arange(int(offsets[-1]))]
