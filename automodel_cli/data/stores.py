"""What a cache entry holds: tokenised documents, or packed rows; flat memory-mapped arrays with offsets, no padding."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from automodel_cli.data.chat import Encoded
from automodel_cli.data.packing import Packed, in_halves
from automodel_cli.data.rows import Rejected, RowError, read_rejected, write_rejected

WRITE_TOKENS = 1 << 20
"""Tokens gathered before each write: about what a core's cache holds."""


def _none() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class Origin:
    """Where a row of the data stands: file by number, line, and the row itself for the list of refused ones."""

    file: int
    line: int
    row: Any


@dataclass(frozen=True)
class TokenStore:
    """The usable documents of one dataset, in its order.

    `ids`: all tokens; `label_mask`: 1 where the *next* token of the document is trained; document d has the tokens
    `offsets[d]:offsets[d + 1]` and comes from `lines[d]` of `meta["files"][files[d]]`. `rejected`: the other rows.
    """

    folder: Path
    meta: dict[str, Any]
    ids: np.ndarray
    label_mask: np.ndarray
    offsets: np.ndarray
    files: np.ndarray
    lines: np.ndarray
    splits: np.ndarray = field(default_factory=_none)
    judgements: np.ndarray = field(default_factory=_none)

    @classmethod
    def open(cls, folder: Path) -> TokenStore:
        """Memory-map a complete entry."""
        meta = json.loads((folder / "meta.json").read_text())
        arrays = [_load(folder, name) for name in ("offsets", "files", "lines", "splits", "judgements")]
        return cls(folder, meta, _map(folder, "ids", meta["dtype"]), _map(folder, "label_mask", "uint8"), *arrays)

    @property
    def kind(self) -> str:
        """`documents`, `pairs` or `judged`."""
        return str(self.meta.get("kind", "documents"))

    @property
    def num_documents(self) -> int:
        """Documents in all."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each document, int64."""
        return np.diff(self.offsets)

    def rejected(self) -> list[Rejected]:
        """The rows that could not be used; read only when somebody asks."""
        return read_rejected(self.folder / "rejected.jsonl") if self.meta["num_rejected"] else []


@dataclass(frozen=True)
class PackedStore:
    """Rows of one dataset, ready to be batched.

    Row r holds the pieces `row_offsets[r]:row_offsets[r + 1]`; piece p the tokens `offsets[p]:offsets[p + 1]`, from
    `lines[p]` of `meta["files"][files[p]]`. `num_label_tokens[r]` counts the row's trained tokens. Label masks never
    reach over a piece's end. Where `kind` is `pairs` or `judged` the pieces 2i and 2i + 1 belong together, and
    `roles[p]` is 1 for a chosen or good response, 0 for a rejected or bad one, -1 for one that is only scored.
    """

    meta: dict[str, Any]
    ids: np.ndarray
    label_mask: np.ndarray
    offsets: np.ndarray
    row_offsets: np.ndarray
    files: np.ndarray
    lines: np.ndarray
    num_label_tokens: np.ndarray
    roles: np.ndarray = field(default_factory=_none)

    @classmethod
    def open(cls, folder: Path) -> PackedStore:
        """Memory-map a complete entry."""
        meta = json.loads((folder / "meta.json").read_text())
        names = ("offsets", "row_offsets", "files", "lines", "num_label_tokens", "roles")
        arrays = [_load(folder, name) for name in names]
        return cls(meta, _map(folder, "ids", meta["dtype"]), _map(folder, "label_mask", "uint8"), *arrays)

    @property
    def kind(self) -> str:
        """`documents`, `pairs` or `judged`."""
        return str(self.meta.get("kind", "documents"))

    @property
    def num_rows(self) -> int:
        """Rows in all."""
        return len(self.row_offsets) - 1


def write_tokens(
    folder: Path,
    batches: Iterable[list[Encoded | RowError]],
    origins: Iterable[Origin],
    *,
    meta: dict[str, Any],
    special_ids: Collection[int],
) -> None:
    """Write a token entry from encoded rows and, in the same order, where each comes from. `meta` names `files`,
    `dtype` and `kind`.
    """
    lengths, files, lines, splits, judgements = [], [], [], [], []
    rejected: list[Rejected] = []
    num_rows = ends_trained = 0
    place = iter(origins)
    with (folder / "ids.bin").open("wb") as ids_file, (folder / "label_mask.bin").open("wb") as mask_file:
        for batch in batches:
            good: list[Encoded] = []
            for item in batch:
                num_rows += 1
                origin = next(place)
                if isinstance(item, RowError):
                    rejected.append(_reject(item, origin, meta["files"][origin.file]))
                    continue
                good.append(item)
                files.append(origin.file)
                lines.append(origin.line)
            if not good:
                continue
            ids_file.write(np.concatenate([item.ids for item in good]).astype(meta["dtype"]).tobytes())
            mask_file.write(np.concatenate([_next_trained(item.trained) for item in good]).tobytes())
            lengths += [len(item.ids) for item in good]
            splits += [item.split for item in good]
            judgements += [item.judgement for item in good]
            ends_trained += sum(int(_last_trained(item)) in special_ids for item in good)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    np.save(folder / "offsets.npy", offsets)
    np.save(folder / "files.npy", np.asarray(files, np.int32))
    np.save(folder / "lines.npy", np.asarray(lines, np.int64))
    np.save(folder / "splits.npy", np.asarray(splits, np.int64))
    np.save(folder / "judgements.npy", np.asarray(judgements, np.int8))
    write_rejected(folder / "rejected.jsonl", rejected)
    label_tokens = int(np.sum(_map(folder, "label_mask", "uint8"), dtype=np.int64))
    counts = {"num_rows": num_rows, "num_rejected": len(rejected), "ends_trained": ends_trained}
    (folder / "meta.json").write_text(json.dumps({**meta, **counts, "num_label_tokens": label_tokens}))


def _reject(error: RowError, origin: Origin, source: str) -> Rejected:
    row = origin.row if error.raw is None else error.raw.rstrip("\n")
    return Rejected(source, origin.line, error.code, error.message, row, error.fix)


def _next_trained(trained: np.ndarray) -> np.ndarray:
    """Per token whether its label (the next token) is trained; the last token has no label."""
    out = np.zeros(len(trained), np.uint8)
    out[:-1] = trained[1:]
    return out


def _last_trained(item: Encoded) -> int:
    return item.ids[np.flatnonzero(item.trained)[-1]]


def write_packed(folder: Path, source: TokenStore, packed: Packed, *, meta: dict[str, Any]) -> None:
    """Write the rows' tokens and masks in their order, with document boundaries and the line each piece comes from."""
    kind = source.kind
    if kind != "documents":
        packed = in_halves(packed, source.splits[packed.pieces.document])
    pieces = packed.pieces
    offsets = np.concatenate([[0], np.cumsum(pieces.length)]).astype(np.int64)
    first = source.offsets[pieces.document] + pieces.start
    starts, stops = first.tolist(), (first + pieces.length).tolist()
    cuts = np.searchsorted(offsets, np.arange(0, offsets[-1] + WRITE_TOKENS, WRITE_TOKENS)).clip(max=len(starts))
    # plain arrays: slicing a memmap costs ten times as much
    all_ids, all_mask = np.asarray(source.ids), np.asarray(source.label_mask)
    labels = np.zeros(len(starts), np.int64)
    with (folder / "ids.bin").open("wb") as ids_file, (folder / "label_mask.bin").open("wb") as mask_file:
        for a, b in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            if a == b:
                continue
            spans = list(zip(starts[a:b], stops[a:b], strict=True))
            ids_file.write(np.concatenate([all_ids[i:j] for i, j in spans]).data)
            mask = np.concatenate([all_mask[i:j] for i, j in spans])
            mask[offsets[a + 1 : b + 1] - offsets[a] - 1] = 0  # a cut document's next token stands in another row
            mask_file.write(mask.data)
            labels[a:b] = np.add.reduceat(mask, offsets[a:b] - offsets[a], dtype=np.int64)
    per_row = np.add.reduceat(labels, packed.row_offsets[:-1]) if packed.num_rows else labels
    for name, array in (
        ("offsets", offsets),
        ("row_offsets", packed.row_offsets),
        ("files", source.files[pieces.document]),
        ("lines", source.lines[pieces.document]),
        ("num_label_tokens", per_row),
        ("roles", _none() if kind == "documents" else _roles(kind, source.judgements[pieces.document])),
    ):
        np.save(folder / f"{name}.npy", array)
    (folder / "meta.json").write_text(
        json.dumps({**meta, "kind": kind, "dtype": source.meta["dtype"], "files": source.meta["files"]})
    )


def _roles(kind: str, judgements: np.ndarray) -> np.ndarray:
    """See `PackedStore`."""
    roles = judgements.astype(np.int8)
    if kind == "pairs":
        roles[::2], roles[1::2] = 1, 0
    else:
        roles[1::2] = -1
    return roles


def _load(folder: Path, name: str) -> np.ndarray:
    return np.load(folder / f"{name}.npy")


def _map(folder: Path, name: str, dtype: str) -> np.ndarray:
    path = folder / f"{name}.bin"
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r")
