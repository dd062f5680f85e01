"""Blocks: rows of a lane that are tokenized, packed and shuffled together.

A block is a function of its rows, so a resumed run builds the same block again. It is written and read by the code that
prepares whole datasets.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np

from automodel_cli.config.errors import DataError
from automodel_cli.config.warn import warn
from automodel_cli.data.config import DataConfig
from automodel_cli.data.preparation.row_packer import RowPacker
from automodel_cli.data.preparation.token_writer import TokenWriter
from automodel_cli.data.row_errors import rows_error
from automodel_cli.data.storage.memmap_store import PackedStore, TokenStore
from automodel_cli.data.streaming.lane_reader import Chunk, Place

_PLACES = 8
_FREE_BYTES = 1 << 30


@dataclass(frozen=True)
class Block:
    """Packed rows in memory, None if all rows are rejected. `end`: place after the last row."""

    store: PackedStore | None
    end: Place
    left_out: LeftOut

    @property
    def num_rows(self) -> int:
        """Rows of the files, with rejected ones."""
        return self.left_out.rows

    @property
    def num_sequences(self) -> int:
        """Number of packed sequences."""
        return 0 if self.store is None else self.store.num_rows


class BlockBuilder:
    """Builds the blocks of one dataset."""

    def __init__(self, writer: TokenWriter, config: DataConfig):
        self.writer, self._config = writer, config
        choice = config.long_choice(is_text=bool(writer.meta["is_text"]), preferences=False)
        self._packer = RowPacker(config, writer.encoder.tokenizer, False, choice)
        self._lock = threading.Lock()  # a tokenizer changes its options at each call

    def build(self, chunk: Chunk) -> Block:
        """Raise DataError for invalid rows and damaged shards, unless they are dropped."""
        if chunk.damaged and self._config.on_invalid_row == "fail":
            raise DataError(
                f"{len(chunk.damaged)} shards are damaged: {'; '.join(chunk.damaged)}",
                code="damaged_file",
                keys=("data.path",),
                fix="write the file again, or skip damaged shards: data.on_invalid_row=drop",
            )
        with self._lock, tempfile.TemporaryDirectory(prefix="automodel-block-", dir=_memory_folder()) as place:
            tokens, packed = Path(place) / "tokens", Path(place) / "packed"
            tokens.mkdir()
            packed.mkdir()
            replace(self.writer, meta={**self.writer.meta, "files": chunk.files}).write(tokens, chunk.rows)
            encoded = TokenStore.open(tokens)
            rejected = encoded.rejected()
            if rejected and self._config.on_invalid_row == "fail":
                raise rows_error(rejected, len(chunk.rows), fix="correct the rows, or data.on_invalid_row=drop")
            store = None
            if encoded.num_documents:
                self._packer.write(encoded, None, "", packed)
                store = _in_memory(PackedStore.open(packed))
        for shard in chunk.damaged:
            warn("damaged_file", "the rest of a shard is left out: %s", shard)
        places = [f"{row.source}:{row.line}: {row.message}" for row in rejected[:_PLACES]]
        return Block(store, chunk.end, LeftOut(len(chunk.rows), len(rejected), places, chunk.damaged))


@dataclass
class LeftOut:
    """Rows read so far, and what of them was left out. Only the first places are kept."""

    rows: int = 0
    rejected: int = 0
    places: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)

    def add(self, other: LeftOut) -> None:
        """Add counts. A shard that is damaged on every pass counts once."""
        self.rows, self.rejected = self.rows + other.rows, self.rejected + other.rejected
        self.places = [*self.places, *other.places][:_PLACES]
        self.damaged = list(dict.fromkeys([*self.damaged, *other.damaged]))

    def check(self, most: float, num_shards: int) -> None:
        """Raise DataError if more than the share `most` of the rows or of the shards was left out."""
        counts = (
            ("rows", self.rows, self.rejected, self.places),
            ("shards", num_shards, len(self.damaged), self.damaged),
        )
        for name, total, invalid, places in counts:
            share = invalid / max(1, total)
            if share > most:
                listed = "; ".join(places[:_PLACES]) + ("; ..." if invalid > _PLACES else "")
                raise DataError(
                    f"{invalid:,} of {total:,} {name} cannot be used, more than data.max_invalid_fraction={most}: "
                    f"{listed}",
                    code="bad_rows" if name == "rows" else "damaged_file",
                    keys=("data.max_invalid_fraction",),
                    fix=f"data.max_invalid_fraction={min(1.0, np.ceil(share * 100 + 1e-9) / 100):g}",
                )


@cache
def _memory_folder() -> str | None:
    """Return a folder in memory for the few MB of a block, None for the usual temporary folder."""
    folder = Path("/dev/shm")
    is_usable = folder.is_dir() and os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > _FREE_BYTES
    return str(folder) if is_usable else None


def _in_memory(store: PackedStore) -> PackedStore:
    # Copies: the files that the arrays map are deleted with the temporary folder.
    return replace(store, ids=np.array(store.ids), label_mask=np.array(store.label_mask))
