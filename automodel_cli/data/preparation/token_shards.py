"""Tokenize a large dataset in shards, and join them to one token entry.

A shard is an entry of the cache of its own, so a killed process loses only the shard that it was building, and several
processes or nodes build different shards. The joined entry has the bytes of one that was written in one go. The shards
are removed when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from automodel_cli.data.formats.column_mapping import MissingColumnTracker
from automodel_cli.data.preparation.preparation_progress import PreparationProgress
from automodel_cli.data.preparation.token_writer import TokenWriter
from automodel_cli.data.row_errors import read_rejected, write_rejected
from automodel_cli.data.sources.sources import ShardedSource
from automodel_cli.data.sources.spans import Span
from automodel_cli.data.storage.cache import get_or_build
from automodel_cli.data.storage.memmap_store import TokenStore
from automodel_cli.data.storage.memmap_writer import COUNTS

SHARD = "shard.json"
"""File of a shard: mapped columns that no row had, columns of its rows, and lines of its spans."""
_COUNTS = ("num_rows", "num_rejected", "num_turns", *COUNTS)
_COLUMNS = ("files", "lines", "rows", "shared", "splits", "judgements", "margins")
_OTHER_COLUMNS = ("parts", "part_counts", "targets", "classes")
"""Columns with another number of values than documents."""


@dataclass(frozen=True)
class TokenShards:
    """The shards of one dataset. `root` and `key`: cache folder and key of the joined entry."""

    root: Path
    key: str
    source: ShardedSource
    writer: TokenWriter

    @cached_property
    def spans(self) -> list[list[Span]]:
        """Spans of each shard."""
        return self.source.shards()

    @property
    def folder(self) -> Path:
        """Folder of the shards."""
        return self.root / f"{self.key}.shards"

    def missing(self) -> list[int]:
        """Return the numbers of the shards that are not complete."""
        return [n for n in range(len(self.spans)) if not (self.folder / shard_name(n)).is_dir()]

    def build(self, numbers: Sequence[int], num_workers: int, show: Callable[[str], None]) -> None:
        """Build these shards, in this process or in worker processes. `show` receives a line every few seconds."""
        sizes = {number: self.source.num_bytes_of(self.spans[number]) for number in numbers}
        if numbers:
            where = f"in {num_workers} processes" if num_workers else "in this process"
            show(f"tokenizing {self.source.name}: {len(numbers)} of {len(self.spans)} shards {where}")
        progress = PreparationProgress(show, self.source.name, sum(sizes.values()))
        for number, num_tokens in self._built(numbers, min(num_workers, len(numbers))):
            progress.add(sizes[number], num_tokens)

    def _built(self, numbers: Sequence[int], num_workers: int) -> Iterator[tuple[int, int]]:
        if num_workers == 0:
            yield from ((number, self.build_one(number)) for number in numbers)
            return
        # Spawn, because a fork of a process whose tokenizer has started threads can deadlock.
        with ProcessPoolExecutor(num_workers, get_context("spawn"), _start_worker, (self,)) as pool:
            try:
                for done in as_completed([pool.submit(_build_in_worker, number) for number in numbers]):
                    yield done.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def build_one(self, number: int) -> int:
        """Build a shard, or wait for the process that builds it. Return its number of tokens."""
        # Atomic: a shard exists completely or not at all. A killed process loses its unfinished shards only.
        folder, _ = get_or_build(
            self.folder, shard_name(number), lambda folder: self._write(folder, self.spans[number])
        )
        return int(np.load(folder / "offsets.npy", mmap_mode="r")[-1])

    def _write(self, folder: Path, spans: Sequence[Span]) -> None:
        unseen = self.writer.write(folder, self.source.rows_of(spans))
        lines = list(self.source.num_lines_of(spans).items())
        seen = {"missing": sorted(unseen.missing), "present": list(unseen.present), "lines": lines}
        (folder / SHARD).write_text(json.dumps(seen))

    def join(self, folder: Path) -> MissingColumnTracker:
        """Write the joined entry into an empty folder. Every shard must be complete."""
        shards = self._folders
        for name in ("ids.bin", "label_mask.bin"):
            with (folder / name).open("wb") as joined:
                for shard in shards:
                    with (shard / name).open("rb") as part:
                        shutil.copyfileobj(part, joined, 4 << 20)
        metas, seen, line_shifts = self._described()
        _join_columns(folder, shards, [meta["num_rows"] for meta in metas], line_shifts)
        _join_rejected(folder, shards, self._file_numbers, line_shifts)
        (folder / "meta.json").write_text(json.dumps(_joined_meta(metas)))
        return self._unseen(seen)

    def totals(self) -> tuple[TokenStore, MissingColumnTracker]:
        """Return counts and rejected rows of all shards, without their documents. Every shard must be complete."""
        metas, seen, line_shifts = self._described()
        _join_rejected(self.folder, self._folders, self._file_numbers, line_shifts)
        ends = [_mapped(shard, "offsets")[1:] for shard in self._folders]
        firsts = np.cumsum([0, *(of[-1] if len(of) else 0 for of in ends)])
        offsets = np.concatenate([[0], *(of + first for of, first in zip(ends, firsts, strict=False))])
        no = np.zeros(0, np.int64)
        return TokenStore(self.folder, _joined_meta(metas), no, no, offsets, no, no, no, no), self._unseen(seen)

    @property
    def _folders(self) -> list[Path]:
        return [self.folder / shard_name(number) for number in range(len(self.spans))]

    @property
    def _file_numbers(self) -> dict[str, int]:
        return {name: n for n, name in enumerate(self.source.files)}

    def _described(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[np.ndarray]]:
        """Return `meta.json` and `SHARD` of every shard, and the lines of each file before it."""
        # A shard numbers the lines of a file from its own first line. Lines of shard n are shifted by those in the
        # shards before. Example: file 0 has 10 lines in shard 0 and 5 in shard 1, file 1 has 7 in shard 1 and 2 in
        # shard 2. The shifts are (0, 0), (10, 0) and (15, 7).
        metas = [json.loads((shard / "meta.json").read_text()) for shard in self._folders]
        seen = [json.loads((shard / SHARD).read_text()) for shard in self._folders]
        return metas, seen, list(_line_shifts([dict(of["lines"]) for of in seen], len(self.source.files)))

    def _unseen(self, seen: Sequence[dict[str, Any]]) -> MissingColumnTracker:
        unseen = MissingColumnTracker(self.writer.columns, self.writer.name)
        unseen.missing = set.intersection(*(set(of["missing"]) for of in seen))
        unseen.present = dict.fromkeys(name for of in seen for name in of["present"])
        return unseen


def remove_shards(root: Path, key: str) -> None:
    """Remove the shards of a complete entry."""
    shutil.rmtree(root / f"{key}.shards", ignore_errors=True)


def shard_name(number: int) -> str:
    """Return the folder of a shard."""
    return f"{number:06d}"


def _line_shifts(lines: Sequence[Mapping[int, int]], num_files: int) -> Iterator[np.ndarray]:
    """Yield for each shard the number of lines of every file in the shards before, int64 (files,)."""
    shifts = np.zeros(num_files, np.int64)
    for of_shard in lines:
        yield shifts.copy()
        for file, number in of_shard.items():
            shifts[file] += number


def _join_columns(folder: Path, shards: Sequence[Path], num_rows: Sequence[int], shifts: Sequence[np.ndarray]) -> None:
    """Join the columns of documents. They are memory-mapped, so that they need not fit into memory."""
    counts = [len(_mapped(shard, "rows")) for shard in shards]
    places = np.cumsum([0, *counts]).tolist()
    first_rows = np.cumsum([0, *num_rows]).tolist()
    joined = {name: _created(folder, name, _mapped(shards[0], name).dtype, places[-1]) for name in _COLUMNS}
    offsets = _created(folder, "offsets", np.dtype(np.int64), places[-1] + 1)
    num_tokens = 0
    for number, shard in enumerate(shards):
        place = slice(places[number], places[number + 1])
        columns = {name: _mapped(shard, name) for name in _COLUMNS}
        for name, values in columns.items():
            joined[name][place] = values
        joined["rows"][place] += first_rows[number]
        joined["lines"][place] += shifts[number][columns["files"]]
        of_shard = _mapped(shard, "offsets")
        # Offsets of a shard begin at 0. The end of one shard is the begin of the next, so only the last end is stored
        # separately.
        offsets[place] = of_shard[:-1] + num_tokens
        num_tokens += int(of_shard[-1])
    offsets[-1] = num_tokens
    for name in _OTHER_COLUMNS:
        _join_values(folder, name, [_mapped(shard, name) for shard in shards])
    assert {path.stem for path in shards[0].glob("*.npy")} == {*_COLUMNS, *_OTHER_COLUMNS, "offsets"}


def _join_values(folder: Path, name: str, parts: Sequence[np.ndarray]) -> None:
    """Join arrays along their first dimension. A shard without documents has no further dimensions."""
    filled = [part for part in parts if len(part)]
    if not filled:
        np.save(folder / f"{name}.npy", parts[0])
        return
    shape = (sum(map(len, filled)), *filled[0].shape[1:])
    joined = np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=filled[0].dtype, shape=shape)
    place = 0
    for part in filled:
        joined[place : place + len(part)] = part
        place += len(part)


def _mapped(shard: Path, name: str) -> np.ndarray:
    values: np.ndarray = np.load(shard / f"{name}.npy", mmap_mode="r")
    return values


def _created(folder: Path, name: str, dtype: np.dtype[Any], length: int) -> np.ndarray:
    if length == 0:  # an empty file cannot be mapped
        np.save(folder / f"{name}.npy", np.zeros(0, dtype))
        return np.zeros(0, dtype)
    return np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=dtype, shape=(length,))


def _join_rejected(
    folder: Path, shards: Sequence[Path], file_numbers: Mapping[str, int], shifts: Sequence[np.ndarray]
) -> None:
    rejected = [
        replace(row, line=row.line + int(shift[file_numbers[row.source]]))
        for shard, shift in zip(shards, shifts, strict=True)
        for row in read_rejected(shard / "rejected.jsonl")
    ]
    write_rejected(folder / "rejected.jsonl", rejected)


def _joined_meta(metas: Sequence[dict[str, Any]]) -> dict[str, object]:
    ends = Counter[int]()
    for meta in metas:
        ends.update(dict(meta["turn_ends"]))
    return {
        **metas[0],
        **{name: sum(meta[name] for meta in metas) for name in _COUNTS},
        "turn_ends": ends.most_common(),
        "unrolled": {name: sum(meta["unrolled"][name] for meta in metas) for name in metas[0]["unrolled"]},
        "not_ignored": [name for name in metas[0]["not_ignored"] if all(name in meta["not_ignored"] for meta in metas)],
        "names": list(dict.fromkeys(name for meta in metas for name in meta["names"])),
    }


_worker_shards: TokenShards | None = None


def _start_worker(shards: TokenShards) -> None:
    global _worker_shards
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already use the cores
    _worker_shards = shards


def _build_in_worker(number: int) -> tuple[int, int]:
    assert _worker_shards is not None, "the worker was started without its dataset"
    return number, _worker_shards.build_one(number)
