"""Which rows each optimizer step sees, on each data-parallel rank; a position in one endless stream is the whole state.

The stream is the same for any number of ranks. Step k takes its rows `k * G ... (k + 1) * G - 1` (G the global batch);
microbatch m of rank r takes the next `microbatch_size` of them after those of lower (m, r). So a run may be resumed
with another number of ranks, or another microbatch size, and trains on the same rows in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.data.batch import Batch
from automodel_cli.data.preparation.dataset import DUMMY_ROW, PackedDataset, shuffled

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
_OTHER_DATA = (
    "resume with the data, packing and seed of the checkpoint, or start a new run from its weights: "
    "automodel export RUN, then model.pretrained=RUN/export"
)


class Rows(Protocol[T_co]):
    """Numbered rows of one or more datasets: dataset i has those from `first_rows[i]` on, and is seen `weights[i]`
    times per epoch."""

    first_rows: np.ndarray
    weights: list[float]

    @property
    def contents(self) -> list[tuple[str, str]]:
        """Name and content hash of each dataset."""

    def collate(self, row_indices: Sequence[int], /) -> T_co:
        """These rows as what a step reads."""


class RowStream:
    """The endless order of row numbers. An epoch holds `round(weight * rows)` rows of every dataset, at least one.

    Each dataset is walked through on its own, in a new order on every pass, and an epoch takes its next rows: with
    weight 0.5 two epochs together see every row once. Within an epoch the datasets are mixed.
    """

    def __init__(self, dataset: Rows[Any], seed: int, shuffle: bool):
        self.seed, self.shuffle = seed, shuffle
        self.first = dataset.first_rows[:-1].tolist()
        self.sizes = np.diff(dataset.first_rows).tolist()
        self.takes = [max(1, round(w * n)) for w, n in zip(dataset.weights, self.sizes, strict=True)]
        self.rows_per_epoch = sum(self.takes)
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def rows(self, start: int, number: int) -> np.ndarray:
        """Row numbers at the positions `start ... start + number - 1` of the stream."""
        out = []
        while number:
            epoch, offset = divmod(start, self.rows_per_epoch)
            part = self._epoch_order(epoch)[offset : offset + number]
            out.append(part)
            start, number = start + len(part), number - len(part)
        return np.concatenate(out)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            parts = [self._source_rows(source, epoch) for source in range(len(self.sizes))]
            order = np.concatenate(parts)
            if self.shuffle:
                order = order[shuffled(len(order), self.seed, 1, epoch)]
            self._epoch, self._order = epoch, order
        return self._order

    def _source_rows(self, source: int, epoch: int) -> np.ndarray:
        size, take = self.sizes[source], self.takes[source]
        positions = np.arange(epoch * take, (epoch + 1) * take)
        passes = positions // size
        rows = positions % size
        if self.shuffle:
            for nth in np.unique(passes).tolist():
                chosen = passes == nth
                rows[chosen] = shuffled(size, self.seed, 2, source, nth)[rows[chosen]]
        numbers: np.ndarray = rows + self.first[source]
        return numbers


class BatchLoader(Generic[T]):
    """The microbatches of this rank, optimizer step by optimizer step. Stateful; `state_dict` is the same on every
    rank.
    """

    def __init__(
        self,
        dataset: Rows[T],
        *,
        global_batch_size: int,
        microbatch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        prepare: Callable[[T], T] | None = None,
    ):
        """Sizes count rows. `prepare` (pinning, say) makes the loader work ahead: while a step runs, a thread collates
        the next one's microbatches and prepares them. Raises ConfigError when the global batch is not whole
        microbatches on every rank.
        """
        if global_batch_size < 1 or microbatch_size < 1 or global_batch_size % (microbatch_size * dp_size):
            unit = max(1, microbatch_size) * dp_size
            near = max(1, round(global_batch_size / unit)) * unit
            raise ConfigError(
                f"global_batch_size={global_batch_size} is not a multiple of microbatch_size={microbatch_size} x "
                f"{dp_size} data-parallel ranks",
                code="not_divisible",
                keys=("global_batch_size", "microbatch_size"),
                fix=f"train.global_batch_size={near}",
            )
        self.dataset, self.microbatch_size = dataset, microbatch_size
        self.global_batch_size, self.dp_rank, self.dp_size = global_batch_size, dp_rank, dp_size
        self.stream = RowStream(dataset, seed, shuffle)
        self.position = 0
        self._prepare = prepare
        self._thread = ThreadPoolExecutor(1, "collate") if prepare is not None else None
        self._ahead: tuple[int, Future[list[T]]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps that see every row of an epoch at least once (the last one may begin the next epoch)."""
        return -(-self.stream.rows_per_epoch // self.global_batch_size)

    @property
    def epoch(self) -> float:
        """Epochs seen so far."""
        return self.position / self.stream.rows_per_epoch

    def next_rows(self, ahead: int = 0) -> np.ndarray:
        """Row numbers of this rank's next step (or the one `ahead` steps after it), `[microbatches, microbatch_size]`,
        without moving on."""
        rows = self.stream.rows(self.position + ahead * self.global_batch_size, self.global_batch_size)
        return rows.reshape(-1, self.dp_size, self.microbatch_size)[:, self.dp_rank]

    def peek_step(self, ahead: int = 0) -> list[T]:
        """What `next_step` will return (or return after `ahead` further steps), without moving on."""
        if not ahead and self._ahead is not None and self._ahead[0] == self.position:  # else a state was loaded since
            return self._ahead[1].result()
        return self._collated(self.next_rows(ahead))

    def next_step(self) -> list[T]:
        """This rank's microbatches of one optimizer step; the stream goes on into the next epoch."""
        batches = self.peek_step()
        self.position += self.global_batch_size
        if self._thread is not None:  # the stream is read here: it is not made for two threads
            self._ahead = self.position, self._thread.submit(self._collated, self.next_rows())
        return batches

    def _collated(self, rows: np.ndarray) -> list[T]:
        batches = [self.dataset.collate(of_batch) for of_batch in rows]
        return batches if self._prepare is None else [self._prepare(batch) for batch in batches]

    def state_dict(self) -> dict[str, Any]:
        """The position in the stream and what the stream depends on; independent of rank and number of ranks."""
        stream = self.stream
        return {
            "position": self.position,
            "seed": stream.seed,
            "shuffle": stream.shuffle,
            "sizes": list(stream.sizes),
            "takes": list(stream.takes),
            "contents": [list(pair) for pair in self.dataset.contents],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` stopped. Raises RunError when the rows or their order are not those of the saved run."""
        mine = self.state_dict()
        changed = [key for key in ("seed", "shuffle", "sizes", "takes") if state[key] != mine[key]]
        if changed:
            changes = ", ".join(f"{key} was {state[key]}, is {mine[key]}" for key in changed)
            raise RunError(
                f"the data changed since the checkpoint, so the run cannot resume at its position: {changes}",
                code="checkpoint_mismatch",
                keys=("data",),
                fix=_OTHER_DATA,
            )
        edited = [
            name
            for (name, content), (_, saved) in zip(self.dataset.contents, state["contents"], strict=True)
            if content != saved
        ]
        if edited:
            raise RunError(
                f"the rows of {' and '.join(edited)} differ from those of the checkpoint: the files were edited, or "
                "tokenization or packing changed. Resuming would repeat some rows and skip others",
                code="checkpoint_mismatch",
                keys=("data",),
                fix=_OTHER_DATA,
            )
        self.position = int(state["position"])


def eval_batches(
    dataset: PackedDataset,
    *,
    microbatch_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    num_batches: int | None = None,
) -> list[Batch]:
    """Every row once over all ranks, in order; padded with rows without labels so that all ranks get equally many
    batches. `num_batches` takes only the first of each rank.
    """
    unit = microbatch_size * dp_size
    rows = np.full(-(-len(dataset) // unit) * unit, DUMMY_ROW)
    rows[: len(dataset)] = np.arange(len(dataset))
    mine = rows.reshape(-1, dp_size, microbatch_size)[:num_batches, dp_rank]
    return [dataset.collate(part) for part in mine]
