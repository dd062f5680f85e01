"""Write cache entries (`data/storage/memmap_store.py`)."""

from __future__ import annotations

import itertools
import json
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from automodel_cli.data.fill_in_the_middle import MOVED, TOO_LONG
from automodel_cli.data.formats.base import PREFERENCES
from automodel_cli.data.packing import Packed, Pieces, in_halves, in_parts
from automodel_cli.data.pictures.storage import PictureTable, PictureWriter, of_pieces
from automodel_cli.data.row_errors import Rejected, RowError, SourceRow, write_rejected
from automodel_cli.data.storage.checksums import Checksum
from automodel_cli.data.storage.memmap_store import TokenStore, no_values
from automodel_cli.data.tokenized import Encoded, Unrolled, split_documents

COUNTS = ("num_label_tokens", "special_tokens", "special_rows", "ends_trained", "infilled", "infill_too_long")
"""Counts of documents and tokens in `meta.json` of a token entry, which are sums over its shards."""
WRITE_TOKENS = 1 << 20
"""Tokens per write. About the size of the cache of a CPU core."""


@dataclass
class _UnrolledCount:
    """Counts of rows with several documents. `repeated` counts the tokens of all documents but the last of a row."""

    rows: int = 0
    documents: int = 0
    repeated: int = 0

    def add(self, item: Unrolled) -> None:
        lengths = [len(document.ids) for document in item.documents]
        self.rows += 1
        self.documents += len(lengths)
        self.repeated += sum(lengths) - lengths[-1]


def write_tokens(
    folder: Path,
    batches: Iterable[list[Encoded | Unrolled | RowError]],
    origins: Iterable[SourceRow],
    *,
    meta: dict[str, Any],
    special_ids: Collection[int],
    pictures: PictureWriter | None = None,
) -> None:
    """Write a token entry into an empty folder.

    Args:
        batches: encoded rows.
        origins: file and line of each row, in the same order.
        meta: `files`, `dtype` and `kind` of the entry.
        special_ids: ids of special tokens, for the statistics of turn ends.
        pictures: receives the pictures of each document.
    """
    columns, rejected, unrolled, totals = _Columns(pictures), list[Rejected](), _UnrolledCount(), Counter[str]()
    turn_ends, num_rows, place = Counter[int](), 0, iter(origins)
    with (folder / "ids.bin").open("wb") as ids_file, (folder / "label_mask.bin").open("wb") as mask_file:
        for batch in batches:
            good, begun = list[Encoded](), list[int]()
            for item in batch:
                num_rows += 1
                origin = next(place)
                if isinstance(item, RowError):
                    rejected.append(_reject(item, origin, meta["files"][origin.file]))
                    if pictures is not None and item.file is not None:
                        pictures.watch(item.file)
                    continue
                documents = split_documents(item)
                good += documents
                begun += [0, *(_shared(a, b) for a, b in itertools.pairwise(documents))]
                columns.locate(len(documents), origin, num_rows)
                if isinstance(item, Unrolled):
                    unrolled.add(item)
            if not good:
                continue
            own = list(zip(good, begun, strict=True))
            ids_file.write(np.concatenate([item.ids[n:] for item, n in own]).astype(meta["dtype"]).tobytes())
            mask = np.concatenate([_next_trained(item.trained[n:]) for item, n in own])
            mask_file.write(mask.tobytes())
            columns.describe(own)
            totals["num_label_tokens"] += int(mask.sum(dtype=np.int64))
            _add_documents(totals, good, special_ids)
            turn_ends.update(token for item in good for token in _turn_ends(item))
    columns.save(folder)
    write_rejected(folder / "rejected.jsonl", rejected)
    counts = {
        "num_rows": num_rows,
        "num_rejected": len(rejected),
        "num_turns": turn_ends.total(),
        "turn_ends": [pair for pair in turn_ends.most_common() if pair[0] in special_ids],
        "unrolled": vars(unrolled),
        **{name: totals[name] for name in COUNTS},
    }
    (folder / "meta.json").write_text(json.dumps({**meta, **counts}))


def _add_documents(totals: Counter[str], documents: Sequence[Encoded], special_ids: Collection[int]) -> None:
    totals["special_tokens"] += sum(item.num_special for item in documents)
    totals["special_rows"] += sum(item.num_special > 0 for item in documents)
    totals["ends_trained"] += sum(_last_trained(item) in special_ids for item in documents)
    totals["infilled"] += sum(item.infill == MOVED for item in documents)
    totals["infill_too_long"] += sum(item.infill == TOO_LONG for item in documents)


class _Columns:
    """Per-document columns. 8 bytes per value, so they stay small compared to a batch of tokens."""

    def __init__(self, pictures: PictureWriter | None = None):
        self._lengths, self._pictures = array("q"), pictures
        integers = ("files", "lines", "rows", "shared", "splits", "judgements")
        self._parts: list[tuple[int, ...]] = []
        self._targets: list[tuple[float, ...]] = []
        self._classes: list[np.ndarray] = []
        self._of: dict[str, array[Any]] = {**{name: array("q") for name in integers}, "margins": array("f")}

    def locate(self, num_documents: int, origin: SourceRow, row: int) -> None:
        """Append the origin of the documents of one row."""
        for name, value in (("files", origin.file), ("lines", origin.line), ("rows", row)):
            self._of[name].extend([value] * num_documents)

    def describe(self, documents: Sequence[tuple[Encoded, int]]) -> None:
        """Append documents, each with the number of tokens that it shares with its predecessor."""
        self._lengths.extend(len(item.ids) - n for item, n in documents)
        self._of["shared"].extend(n for _, n in documents)
        self._of["splits"].extend(item.split for item, _ in documents)
        self._of["judgements"].extend(item.judgement for item, _ in documents)
        self._of["margins"].extend(item.margin for item, _ in documents)
        self._parts.extend(item.parts for item, _ in documents if item.parts)
        self._targets.extend(item.targets for item, _ in documents if item.targets)
        self._classes.extend(item.classes for item, _ in documents if item.classes is not None)
        if self._pictures is not None:
            for item, _ in documents:
                self._pictures.add(item.pictures, item.num_first_pictures)

    def save(self, folder: Path) -> None:
        np.save(
            folder / "offsets.npy", np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)]).astype(np.int64)
        )
        dtypes = {"files": np.int32, "judgements": np.int8, "margins": np.float32}
        for name, values in self._of.items():
            np.save(folder / f"{name}.npy", np.asarray(values, dtypes.get(name, np.int64)))
        np.save(folder / "parts.npy", np.asarray([n for parts in self._parts for n in parts], np.int64))
        np.save(folder / "part_counts.npy", np.asarray([len(parts) for parts in self._parts], np.int64))
        np.save(folder / "targets.npy", np.asarray(self._targets, np.float32))
        np.save(folder / "classes.npy", np.concatenate([np.zeros(0, np.int16), *self._classes]))
        if self._pictures is not None:
            self._pictures.save()


def _reject(error: RowError, origin: SourceRow, source: str) -> Rejected:
    row = origin.row if error.raw is None else error.raw.rstrip("\n")
    return Rejected(source, origin.line, error.code, error.message, row, error.fix)


def _shared(before: Encoded, item: Encoded) -> int:
    """Return the length of the longest common prefix of two documents that has no label in the second."""
    most = min(len(before.ids), int(np.argmax(item.trained)) - 1)
    differ = np.flatnonzero(before.ids[:most] != item.ids[:most]) if most > 0 else no_values()
    return int(differ[0]) if len(differ) else max(0, most)


def _next_trained(trained: np.ndarray) -> np.ndarray:
    """Return for each token whether the next token, its label, is trained. The last token has no label."""
    out = np.zeros(len(trained), np.uint8)
    out[:-1] = trained[1:]
    return out


def _last_trained(item: Encoded) -> int:
    return int(item.ids[np.flatnonzero(item.trained)[-1]])


def _turn_ends(item: Encoded) -> list[int]:
    """Return the last token of each run of trained tokens. No run spans both responses of a pair."""
    goes_on = np.append(item.trained[1:], 0)
    ends: list[int] = item.ids[(item.trained != 0) & (goes_on == 0)].tolist()
    return ends


def write_packed(folder: Path, source: TokenStore, packed: Packed, *, meta: dict[str, Any]) -> None:
    """Write a packed entry: tokens and masks in the order of the rows, with the boundaries and origins of pieces."""
    kind = source.kind
    if kind in PREFERENCES:
        packed = in_halves(packed, source.splits[packed.pieces.document])
    if kind == "groups":
        packed = in_parts(packed, source.parts, source.part_counts)
    pieces = packed.pieces
    offsets = np.concatenate([[0], np.cumsum(pieces.length)]).astype(np.int64)
    first = source.offsets[pieces.document] - source.shared[pieces.document] + pieces.start
    last, apart = first + pieces.length, source.shared[pieces.document] > pieces.start
    cuts = np.searchsorted(offsets, np.arange(0, offsets[-1] + WRITE_TOKENS, WRITE_TOKENS)).clip(max=len(first))
    # Plain arrays, because slicing a memmap is ten times as expensive.
    all_ids, all_mask = np.asarray(source.ids), np.asarray(source.label_mask)
    labels = np.zeros(len(first), np.int64)
    content = Checksum()
    with (folder / "ids.bin").open("wb") as ids_file, (folder / "label_mask.bin").open("wb") as mask_file:
        for a, b in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            if a == b:
                continue
            columns = (values[a:b].tolist() for values in (first, last, apart))
            spans = zip(range(a, b), *columns, strict=True)
            parts = [_gathered(source, pieces, n) if far else (all_ids[i:j], all_mask[i:j]) for n, i, j, far in spans]
            ids = np.concatenate([part[0] for part in parts])
            ids_file.write(ids.data)
            mask = np.concatenate([part[1] for part in parts])
            mask[offsets[a + 1 : b + 1] - offsets[a] - 1] = 0  # the next token of a split document is in another row
            mask_file.write(mask.data)
            content.update(ids.view(np.uint8).data)
            content.update(mask.data)
            labels[a:b] = np.add.reduceat(mask, offsets[a:b] - offsets[a], dtype=np.int64)
    per_row = np.add.reduceat(labels, packed.row_offsets[:-1]) if packed.num_rows else labels
    trained = {"offsets": offsets, "row_offsets": packed.row_offsets, **_of_pieces(source, pieces, first, last)}
    for values in trained.values():
        content.update(np.ascontiguousarray(values).view(np.uint8).data)
    origins = {"files": source.files[pieces.document], "lines": source.lines[pieces.document]}
    for name, values in (trained | origins | {"num_label_tokens": per_row}).items():
        np.save(folder / f"{name}.npy", values)
    table = _write_pictures(folder, source, pieces, content) if source.meta.get("has_pictures") else None
    header = {
        "kind": kind,
        "dtype": source.meta["dtype"],
        "files": source.meta["files"],
        "content": content.hexdigest(),
        "picture_table": table,
        "row_spec": source.meta.get("row_spec"),
    }
    (folder / "meta.json").write_text(json.dumps({**meta, **header}))


def _of_pieces(source: TokenStore, pieces: Pieces, first: np.ndarray, last: np.ndarray) -> dict[str, np.ndarray]:
    """Return the columns of pieces that objectives read. Empty if the dataset has none.

    Args:
        first, last: bounds of each piece in the tokens of the dataset.
    """
    classes = np.zeros(0, np.int16)
    if len(source.classes):
        classes = np.concatenate([source.classes[i:j] for i, j in zip(first.tolist(), last.tolist(), strict=True)])
    return {
        "roles": _roles(source.kind, pieces.document, source.judgements),
        "margins": source.margins[pieces.document] if source.margins.any() else np.zeros(0, np.float32),
        "targets": source.targets[pieces.document] if len(source.targets) else no_values(),
        "classes": classes,
    }


def _write_pictures(folder: Path, source: TokenStore, pieces: Pieces, content: Checksum) -> str:
    """Write which pictures the pieces show, and return the name of the entry with their table."""
    table = PictureTable.open(source.folder)
    offsets, index = of_pieces(table, pieces.document, halves=source.kind in PREFERENCES)
    np.save(folder / "picture_offsets.npy", offsets)
    np.save(folder / "picture_index.npy", index)
    keys = np.ascontiguousarray(table.rows["key"][index])
    if len(keys):
        content.update(keys.view(np.uint8).data)
    return source.folder.name


def _gathered(source: TokenStore, pieces: Pieces, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and label mask of a piece whose first tokens are stored with an earlier document."""
    ids, mask = source.document(int(pieces.document[number]))
    place = slice(int(pieces.start[number]), int(pieces.start[number] + pieces.length[number]))
    return ids[place], mask[place]


def _roles(kind: str, document: np.ndarray, judgements: np.ndarray) -> np.ndarray:
    """Return `PackedStore.roles`. `document`: number of the item of each piece."""
    if kind == "groups":  # 0, 1, 2, 2, ... for the documents of a group
        place = np.arange(len(document))
        is_first = np.diff(document, prepend=-1) != 0
        nth: np.ndarray = place - np.maximum.accumulate(np.where(is_first, place, 0))
        of_groups: np.ndarray = np.minimum(nth, 2).astype(np.int8)
        return of_groups
    if kind not in PREFERENCES:
        return no_values()
    roles: np.ndarray = judgements[document].astype(np.int8)
    if kind == "pairs":
        roles[::2], roles[1::2] = 1, 0
    else:
        roles[1::2] = -1
    return roles
