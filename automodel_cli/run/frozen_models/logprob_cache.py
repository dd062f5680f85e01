"""Cache of a frozen model's log-probs for the training data, stored with the cached data. Later and resumed runs read
it. Values are fp32, one or several per token."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from automodel_cli.data.batch import Batch
from automodel_cli.data.preparation.dataset import PackedDataset
from automodel_cli.data.preparation.packed_rows import DUMMY_ROW
from automodel_cli.data.storage.cache import cache_root, cache_unwritable, file_hash
from automodel_cli.data.storage.checksums import content_hash
from automodel_cli.training.metrics.peak_memory import max_over_ranks

if TYPE_CHECKING:
    from automodel_cli.run.trainer import Trainer

_CHUNK = 1 << 24
"""Values summed over ranks at a time: 64 MiB of device memory."""
_BLOB = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
"""A file's id on the hub: of git for small files, SHA-256 for large ones."""


@dataclass(frozen=True)
class RowScores:
    """Computes values: `measure` returns `[B, T]` or `[B, T, width]` for each of `per_call` batches. Collective."""

    measure: Callable[[Sequence[Batch]], list[Tensor]]
    per_call: int


@dataclass(frozen=True)
class RowCache:
    """A file in the folder `name`. `key` identifies the model, given the cache's root. `title`: progress message.
    `width`: values per token, None for one. `scorer` is called if values are missing."""

    session: Trainer
    name: str
    key: Callable[[PackedDataset, Path], str]
    title: str
    scorer: Callable[[], RowScores]
    width: int | None = None

    def attach_all(self, column: str) -> None:
        """Add this column to the training and validation data. Collective."""
        recipe, loader, data = self.session.recipe, self.session.loader, self.session.data
        num_rows = loader.position_after(self.session.num_steps)
        needed = np.unique(loader.stream.rows(0, num_rows))
        data.train.attach(column, self._values(data.train, needed, "training"))
        if data.validation is not None:
            limit = recipe.validation.num_batches
            seen = len(data.validation)
            if limit is not None:
                seen = min(seen, limit * recipe.train.microbatch_size * self.session.mesh.dp_size)
            data.validation.attach(column, self._values(data.validation, np.arange(seen), "validation"))

    def _values(self, rows: PackedDataset, needed: np.ndarray, kind: str) -> np.ndarray:
        """Return the cached values of the sequences and compute missing ones. Collective."""
        session = self.session
        # 1. one file per data set and model, the same on all ranks
        root = cache_root(session.recipe.data.cache_dir)
        key = [self.key(rows, root) if session.is_main else None]
        dist.broadcast_object_list(key, src=0, device=torch.device("cpu"))  # one rank reads the weights for it
        path = root / self.name / f"{key[0]}.npy"
        # 2. Missing sequences of this host's cache. A sequence counts as present if its first token has a value.
        shape = (rows.num_tokens,) if self.width is None else (rows.num_tokens, self.width)
        values = _read(path, shape)
        first = values if self.width is None else values[:, 0]
        missing = needed[np.isnan(first[rows.token_starts[needed]])]
        # 3. Hosts may miss different sequences, but all ranks must compute the same ones: then compute all.
        if self._any_rank(len(missing) > 0):
            missing = needed if self._any_rank(len(missing) < len(needed)) else missing
        # 4. measure together, write once per host
        if self._any_rank(len(missing) > 0):
            if session.is_main:
                print(f"{self.title} of {len(missing):,} {kind} rows", file=sys.stderr, flush=True)
            values = self._measured(rows, values, missing)
            if int(os.environ.get("LOCAL_RANK", "0")) == 0:
                _write(path, values)
            dist.barrier()
            values = np.load(path, mmap_mode="r")
        return values

    def _any_rank(self, yes: bool) -> bool:
        return max_over_ranks(float(yes), self.session.mesh.device) > 0

    def _measured(self, rows: PackedDataset, values: np.ndarray, missing: np.ndarray) -> np.ndarray:
        """Return `values` with missing sequences filled in, on every rank."""
        mesh, train, scored = self.session.mesh, self.session.recipe.train, self.scorer()
        unit = train.microbatch_size * mesh.dp_size * scored.per_call
        padded = np.full(-(-len(missing) // unit) * unit, DUMMY_ROW)
        padded[: len(missing)] = missing
        local_rows = padded.reshape(-1, scored.per_call, mesh.dp_size, train.microbatch_size)[:, :, mesh.dp_rank]
        measured = np.zeros(values.shape, np.float32)
        for numbers in local_rows:
            batches = [rows.collate(of_batch) for of_batch in numbers]
            for of_batch, values_BT in zip(numbers, scored.measure(batches), strict=True):
                for row, values_T in zip(of_batch.tolist(), values_BT.float().cpu().numpy(), strict=True):
                    if row != DUMMY_ROW:
                        first, last = rows.token_starts[row : row + 2]
                        measured[first:last] = values_T[: last - first]
        flat = measured.reshape(-1)
        for first in range(0, len(flat), _CHUNK):
            part = torch.from_numpy(flat[first : first + _CHUNK])
            flat[first : first + _CHUNK] = mesh.sum_over(mesh.dp, part).cpu().numpy()
        filled = np.array(values)
        for row in missing.tolist():
            span = slice(rows.token_starts[row], rows.token_starts[row + 1])
            filled[span] = measured[span]
        return filled


def content_of(path: Path, root: Path) -> str:
    """Return an id of a file's bytes: the blob id of the hub if the file links into its cache, else a hash."""
    blob = path.resolve()
    if blob.parent.name == "blobs" and _BLOB.fullmatch(blob.name):
        return blob.name
    return file_hash(path, root)


def _read(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Return the cached values of all rows. Rows without a value are nan. All are nan if the file is damaged."""
    note = path.with_suffix(".xxh3")
    if path.exists() and note.exists() and note.read_text() == content_hash(path):
        values = np.load(path, mmap_mode="r")
        if values.shape == shape:
            return cast("np.ndarray", values)
    return np.broadcast_to(np.float32(np.nan), shape)


def _write(path: Path, values: np.ndarray) -> None:
    """Values, then the hash of their file: a reader in between finds none that fits, and measures again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, note = (path.with_name(f"{path.stem}.tmp-{os.getpid()}{suffix}") for suffix in (".npy", ".xxh3"))
    try:
        np.save(temporary, values)
        note.write_text(content_hash(temporary))
        os.replace(temporary, path)
        os.replace(note, path.with_suffix(".xxh3"))
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise cache_unwritable(path.parent, error) from error
