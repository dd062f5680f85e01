"""Tokenize the rows of a dataset in this process or in worker processes."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Protocol

from automodel_cli.data.batched import batched
from automodel_cli.data.json_reader import Row
from automodel_cli.data.row_errors import RowError
from automodel_cli.data.tokenized import EncodedRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_ROWS = 256
BYTES_PER_WORKER = 16 << 20
"""Number of bytes whose tokenization takes as long as starting a worker, a few seconds."""


class Encodes(Protocol):
    """Encodes the rows of one dataset with its tokenizer. Picklable, for worker processes."""

    tokenizer: PreTrainedTokenizerBase

    def encode(self, rows: Sequence[Row | RowError]) -> list[EncodedRow]:
        """Return one result per row, in order. Rows without a trained token are rejected."""


def choose_workers(num_workers: int | None, num_bytes: int) -> int:
    """Return the number of worker processes. By default 0 for small data and at most one per core for large data."""
    if num_workers is not None:
        return num_workers
    cores = len(os.sched_getaffinity(0))
    workers = min(cores, num_bytes // BYTES_PER_WORKER)
    return workers if workers > 1 else 0


def encode_all(encoder: Encodes, rows: Iterable[Row | RowError], num_workers: int) -> Iterator[list[EncodedRow]]:
    """Yield the results of each batch in the order of `rows`, independent of `num_workers`."""
    batches = batched(rows, BATCH_ROWS)
    if num_workers == 0:
        yield from map(encoder.encode, batches)
        return
    # Spawn, because a fork of a process whose tokenizer has started threads can deadlock.
    with ProcessPoolExecutor(num_workers, get_context("spawn"), _start_worker, (encoder,)) as pool:
        waiting: deque[Future[list[EncodedRow]]] = deque()
        for batch in batches:
            waiting.append(pool.submit(_encode_in_worker, batch))
            if len(waiting) > 2 * num_workers:  # bound the queue, so that the file is not held in memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


_worker_encoder: Encodes | None = None


def _start_worker(encoder: Encodes) -> None:
    global _worker_encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes already use the cores
    _worker_encoder = encoder


def _encode_in_worker(rows: list[Row | RowError]) -> list[EncodedRow]:
    assert _worker_encoder is not None, "the worker was started without its encoder"
    return _worker_encoder.encode(rows)
