"""Assign sequences to optimizer steps and data-parallel ranks. The state is one position in an endless stream.

The stream does not depend on the number of ranks. Step k uses its entries `k * G ... (k + 1) * G - 1` (G: global batch
size). Within a step, microbatch m of rank r takes the next `microbatch_size` entries after all lower (m, r). A run can
therefore be resumed with another number of ranks or another microbatch size, and each step trains on the same
sequences.

Example: G = 8, 2 ranks, `microbatch_size` 2. Step 0 uses the entries 0 to 7::

    microbatch 0   rank 0: 0 1   rank 1: 2 3
    microbatch 1   rank 0: 4 5   rank 1: 6 7

Sequences with pictures have different work. They are dealt so that all microbatches of a step have about the same
(`dealing.py`). The step still trains on the same sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.data.batch import Batch
from automodel_cli.data.mixture import Mixture
from automodel_cli.data.preparation.dataset import PackedDataset
from automodel_cli.data.preparation.dealing import dealt
from automodel_cli.data.preparation.packed_rows import DUMMY_ROW
from automodel_cli.data.preparation.row_stream import row_stream

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
_OTHER_DATA = (
    "resume with the data, packing and seed of the checkpoint, or read the new data from their start: "
    "checkpoint.new_data=restart, or start a new run from its weights: "
    "automodel export RUN, then model.pretrained=RUN/export"
)


class Rows(Protocol[T_co]):
    """Indexed sequences of one or more datasets. Dataset i starts at `first_rows[i]`."""

    first_rows: np.ndarray
    mixture: Mixture

    @property
    def row_lengths(self) -> np.ndarray:
        """Tokens of each sequence, int64 (sequences,). They count for `sampling_weight`."""

    @property
    def contents(self) -> list[tuple[str, str]]:
        """Name and content hash of each dataset."""

    def collate(self, row_indices: Sequence[int], /) -> T_co:
        """Return these sequences as input of a step."""


class BatchLoader(Generic[T]):
    """Iterator over the microbatches of this rank by optimizer step. Stateful. `state_dict` is equal on all ranks."""

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
        row_costs: np.ndarray | None = None,
        batch_size: Callable[[int], int] | None = None,
    ):
        """Sizes count sequences. With `prepare` (for example pinning), a thread collates and prepares the microbatches
        of the next step while a step runs. `row_costs`: work of each sequence of the dataset, by which those of a step
        are dealt over ranks and microbatches. Raises ConfigError if the global batch size is not a multiple of the
        microbatch size times the number of ranks.

        `batch_size`: the sequences of the step that begins at a position. None: always `global_batch_size`.
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
        self.dataset, self.microbatch_size, self.row_costs = dataset, microbatch_size, row_costs
        self.global_batch_size, self.dp_rank, self.dp_size = global_batch_size, dp_rank, dp_size
        self._size_at = batch_size or (lambda position: global_batch_size)
        self.seed, self.shuffle = seed, shuffle
        self._lengths = dataset.row_lengths
        by_source = np.split(self._lengths, dataset.first_rows[1:-1])
        self.stream = row_stream(
            by_source, dataset.mixture, seed=seed, shuffle=shuffle, rows_per_step=global_batch_size
        )
        self.position = 0
        self._latest: tuple[int, np.ndarray] = -1, np.zeros(0, np.int64)
        self.tokens_drawn = np.zeros(len(by_source), np.int64)
        """Tokens of each dataset in the steps so far, over all ranks."""
        self._prepare = prepare
        self._thread = ThreadPoolExecutor(1, "collate") if prepare is not None else None
        self._ahead: tuple[int, Future[list[T]]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps that use every sequence of an epoch at least once. The last one may start the next epoch."""
        end = self.stream.rows_per_epoch
        steps, position = self._ramp(lambda steps, position: position >= end)
        return int(steps + max(0, -(-(end - position) // self.global_batch_size)))

    def position_after(self, num_steps: int) -> int:
        """Return the number of sequences in the first `num_steps` steps."""
        steps, position = self._ramp(lambda steps, position: steps >= num_steps)
        return position + (num_steps - steps) * self.global_batch_size

    def _ramp(self, is_end: Callable[[int, int], bool]) -> tuple[int, int]:
        """Return steps and sequences before the first step that is an end or has the full size."""
        steps = position = 0
        while not is_end(steps, position) and (size := self._size_at(position)) < self.global_batch_size:
            steps, position = steps + 1, position + size
        return steps, position

    @property
    def epoch(self) -> float:
        """Epochs completed so far."""
        return float(self.position / self.stream.rows_per_epoch)

    def token_shares(self) -> dict[str, float]:
        """Return the share of each dataset in the tokens so far, by its name in metrics. Empty for one dataset."""
        names, total = self.dataset.mixture.names, int(self.tokens_drawn.sum())
        if len(names) < 2 or not total:
            return {}
        return {f"token_share_{name}": n / total for name, n in zip(names, self.tokens_drawn.tolist(), strict=True)}

    def next_rows(self, ahead: int = 0) -> np.ndarray:
        """Return the indices of this rank's next step, or `ahead` steps later, `[microbatches, microbatch_size]`,
        without advancing."""
        position = self.position
        for _ in range(ahead):
            position += self._size_at(position)
        rows = self._rows_at(position)
        if self.row_costs is not None:
            rows = rows[dealt(self.row_costs[rows], len(rows) // self.microbatch_size)]
        # [G] -> [microbatches, ranks, microbatch_size] -> this rank's [microbatches, microbatch_size].
        return rows.reshape(-1, self.dp_size, self.microbatch_size)[:, self.dp_rank]

    def peek_step(self, ahead: int = 0) -> list[T]:
        """Return the result of the next `next_step` call, or `ahead` steps later, without advancing."""
        if not ahead and self._ahead is not None and self._ahead[0] == self.position:  # unless a state was loaded since
            return self._ahead[1].result()
        return self._collated(self.next_rows(ahead))

    def next_step(self) -> list[T]:
        """Return this rank's microbatches of one optimizer step. The stream continues in the next epoch."""
        batches = self.peek_step()
        rows = self._rows_at(self.position)
        sources = np.searchsorted(self.dataset.first_rows, rows, side="right") - 1
        np.add.at(self.tokens_drawn, sources, self._lengths[rows])
        self.position += len(rows)
        if self._thread is not None:  # read the stream in this thread: it is not thread-safe
            self._ahead = self.position, self._thread.submit(self._collated, self.next_rows())
        return batches

    def _rows_at(self, position: int) -> np.ndarray:
        """Return the sequences of the step at a position. They are read twice: to collate, and to count tokens."""
        if self._latest[0] != position:
            self._latest = position, self.stream.rows(position, self._size_at(position))
        return self._latest[1]

    def _collated(self, rows: np.ndarray) -> list[T]:
        batches = [self.dataset.collate(of_batch) for of_batch in rows]
        return batches if self._prepare is None else [self._prepare(batch) for batch in batches]

    def check(self) -> None:
        """Nothing: prepared data were checked before the run."""

    def new_files(self) -> int:
        """0: prepared data do not grow."""
        return 0

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream and everything that defines the stream. Independent of the ranks."""
        return {
            "position": self.position,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "sizes": np.diff(self.dataset.first_rows).tolist(),
            "mixture": self.stream.definition(self.position),
            "tokens_drawn": self.tokens_drawn.tolist(),
            "contents": [list(pair) for pair in self.dataset.contents],
        }

    def load_state_dict(self, state: dict[str, Any], *, accept_new_data: bool = False) -> bool:
        """Continue from `state`, or from the start of new data. Return whether the data are new.

        Weights of a curriculum may change from the position of the state on. Raises RunError if the sequences or their
        order differ from the saved run, unless `accept_new_data`.
        """
        difference = self._difference(state)
        if difference is not None and not accept_new_data:
            raise RunError(difference, code="checkpoint_mismatch", keys=("data",), fix=_OTHER_DATA)
        if difference is None:
            self.position = int(state["position"])
            self.tokens_drawn = np.array(state["tokens_drawn"], np.int64)
        return difference is not None

    def _difference(self, state: dict[str, Any]) -> str | None:
        """Return how the sequences or their order differ from those of `state`, None if they are equal."""
        if state.get("streamed"):
            return "the checkpoint was trained on streamed data, and this run prepares them"
        current = {**self.state_dict(), "mixture": self.stream.definition(int(state["position"]))}
        changed = [key for key in ("seed", "shuffle", "sizes", "mixture") if state[key] != current[key]]
        if changed:
            changes = ", ".join(f"{key} was {state[key]}, is {current[key]}" for key in changed)
            return f"the data changed since the checkpoint, so the run cannot resume at its position: {changes}"
        edited = [
            name
            for (name, content), (_, saved) in zip(self.dataset.contents, state["contents"], strict=True)
            if content != saved
        ]
        if not edited:
            return None
        return (
            f"the rows of {' and '.join(edited)} differ from those of the checkpoint: the files were edited, or "
            "tokenization or packing changed. Resuming would repeat some rows and skip others"
        )


def eval_batches(
    dataset: PackedDataset,
    *,
    microbatch_size: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    num_batches: int | None = None,
) -> list[Batch]:
    """Iterate once over all sequences in order, distributed over all ranks. Padding sequences without labels give all
    ranks the same number of batches. `num_batches`: only the first batches of each rank.
    """
    unit = microbatch_size * dp_size
    # 10 sequences, microbatches of 2 on 2 ranks: unit 4, so 12 rows, of which 2 are empty.
    rows = np.full(-(-len(dataset) // unit) * unit, DUMMY_ROW)
    rows[: len(dataset)] = np.arange(len(dataset))
    local_rows = rows.reshape(-1, dp_size, microbatch_size)[:num_batches, dp_rank]
    return [dataset.collate(part) for part in local_rows]
