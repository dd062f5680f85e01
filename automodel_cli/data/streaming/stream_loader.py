"""Microbatches of a streamed dataset by optimizer step, in an order that does not depend on the ranks.

Entry n of the stream is the next sequence of lane `n % num_lanes`. Step k uses the entries `k * G ... (k + 1) * G - 1`
(G: global batch size), as with prepared data. Each data-parallel rank reads `num_lanes / dp_size` consecutive lanes,
and no others.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from automodel_cli.config.errors import DataError, RunError
from automodel_cli.data.batch import Batch
from automodel_cli.data.stream_config import StreamConfig
from automodel_cli.data.streaming.blocks import LeftOut
from automodel_cli.data.streaming.lane import Lane, LaneState, SourceLane, Taken
from automodel_cli.data.streaming.lane_reader import LaneOrder, LaneReader
from automodel_cli.data.streaming.stream_source import KnownFile
from automodel_cli.data.streaming.streamed_data import StreamedDataset

Generations = list[list[list[KnownFile]]]
"""Files of each dataset, in groups that became known together."""
_NEW_DATA = (
    "resume with the data and settings of the checkpoint, or read the new data from their start: "
    "checkpoint.new_data=restart"
)


@dataclass(frozen=True)
class _Step:
    batches: list[Any]
    places: dict[int, str]
    state: list[LaneState]
    """States of this rank's lanes after the step."""
    tokens: list[int]
    left_out: LeftOut


class StreamLoader:
    """Iterator over the microbatches of this rank by optimizer step. A thread prepares the next step."""

    steps_per_epoch = None
    """Unknown."""

    def __init__(
        self,
        dataset: StreamedDataset,
        *,
        global_batch_size: int,
        batch_sizes: Sequence[int],
        microbatch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        batch_size: Callable[[int], int] | None = None,
        prepare: Callable[[Any], Any] | None = None,
        gather: Callable[[Any], list[Any]] = lambda value: [value],
        sum_over: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ):
        """Args as of `BatchLoader`, and:

        batch_sizes: all sizes that steps have.
        gather: returns the objects of all data-parallel ranks, in their order. Collective.
        sum_over: sums a tensor over the data-parallel ranks. Collective.
        """
        config = dataset.config.streaming
        assert isinstance(config, StreamConfig), "the dataset is streamed"
        config.check_ranks(batch_sizes, dp_size)
        self.dataset, self.config, self.global_batch_size = dataset, config, global_batch_size
        self.microbatch_size, self.dp_rank, self.dp_size = microbatch_size, dp_rank, dp_size
        self.seed, self.shuffle, self.num_lanes = seed, shuffle, config.num_lanes(batch_sizes)
        self._size_at = batch_size or (lambda position: global_batch_size)
        self._prepare, self._gather, self._sum_over = prepare or (lambda batch: batch), gather, sum_over
        phases = dataset.mixture.phases or ((0, (1.0,) * len(dataset.streams)),)
        self._phases = [(step * global_batch_size, shares) for step, shares in phases]
        self.position = 0
        self._readers = ThreadPoolExecutor(config.num_threads, "stream")
        self._stepper = ThreadPoolExecutor(1, "stream-step")
        self._ahead: Future[_Step] | None = None
        self._places: list[dict[int, str]] = []
        dataset.describe = self._describe
        # one listing for all ranks
        self.generations: Generations = gather([stream.source.groups for stream in dataset.streams])[0]
        self._open()

    def _open(self) -> None:
        """Make the lanes of this rank, at the start of the data."""
        per_rank = self.num_lanes // self.dp_size
        own = range(self.dp_rank * per_rank, (self.dp_rank + 1) * per_rank)
        self._orders = [
            LaneOrder(files, stream.source.text_unit, self.num_lanes, self.seed, self.shuffle, number)
            for number, (files, stream) in enumerate(zip(self.generations, self.dataset.streams, strict=True))
        ]
        self.lanes = {lane: self._lane(lane) for lane in own}
        self._last = _Step([], {}, self._states(), self._tokens(), LeftOut())

    def _lane(self, lane: int) -> Lane:
        sources = []
        for stream, order in zip(self.dataset.streams, self._orders, strict=True):
            reader = LaneReader(stream.source, order, lane)
            sources.append(SourceLane(reader, stream.builder, self._readers.submit, block_rows=self.config.block_rows))
        return Lane(sources)

    def token_shares(self) -> dict[str, Tensor]:
        """Return the share of each dataset in the tokens so far. Empty for one dataset. Collective."""
        names = self.dataset.mixture.names
        if len(names) < 2:
            return {}
        tokens = self._sum_over(torch.tensor(self._last.tokens, dtype=torch.int64))
        return {f"token_share_{name}": tokens[i] / tokens.sum() for i, name in enumerate(names)}

    def next_step(self) -> list[Any]:
        """Return this rank's microbatches of one optimizer step."""
        step = (self._ahead or self._submit()).result()
        self.position += self._size_at(self.position)
        self._last, self._ahead = step, None
        self._places = [*self._places[-1:], step.places]
        # One step ahead: a thread tokenizes and packs while the device trains.
        self._ahead = self._submit()
        return step.batches

    def _submit(self) -> Future[_Step]:
        return self._stepper.submit(self._step, self.position)

    def _step(self, position: int) -> _Step:
        for lane in self.lanes.values():
            lane.prefetch()
        phase = max(i for i, (first, _) in enumerate(self._phases) if first <= position)
        rounds = self._size_at(position) // self.num_lanes
        taken = [
            # Example: 4 lanes, step of 8 sequences at position 16. Round 0 has entries 16 to 19 of lanes 0 to 3, round
            # 1 has 20 to 23. A rank has some of the lanes and takes their entries only.
            (position + nth * self.num_lanes + number, lane.take(phase, self._phases[phase][1]))
            for nth in range(rounds)
            for number, lane in self.lanes.items()
        ]
        batches, places = [], {}
        for first in range(0, len(taken), self.microbatch_size):
            batch, origins = self._collated(taken[first : first + self.microbatch_size])
            batches.append(self._prepare(batch))
            places.update(origins)
        left_out = LeftOut()
        for lane in self.lanes.values():
            for source in lane.sources:
                left_out.add(source.left_out())
        return _Step(batches, places, self._states(), self._tokens(), left_out)

    def _collated(self, taken: Sequence[tuple[int, Taken]]) -> tuple[Batch, dict[int, str]]:
        stores = {id(item.store): (item.store, item.source) for _, item in taken}
        for store, _ in stores.values():
            self.dataset.check_store(store)
        numbers = {key: i for i, key in enumerate(stores)}
        dataset = self.dataset.with_stores([s for s, _ in stores.values()], [source for _, source in stores.values()])
        rows = [int(dataset.first_rows[numbers[id(item.store)]]) + item.row for _, item in taken]
        entries = [entry for entry, _ in taken]
        batch = replace(dataset.collate(rows), row_ids_B=torch.tensor(entries, dtype=torch.int64))
        return batch, {entry: dataset.describe(row) for entry, row in zip(entries, rows, strict=True)}

    def _describe(self, entry: int) -> str:
        found = {number: place for places in self._places for number, place in places.items()}
        return found.get(entry, f"sequence {entry} of the stream, of another rank")

    def check(self) -> None:
        """Raise DataError if more than `data.max_invalid_fraction` was left out on all ranks together. Collective."""
        if self.dataset.config.on_invalid_row == "fail":
            return
        total = LeftOut()
        for part in self._gather(asdict(self._last.left_out)):
            total.add(LeftOut(**part))
        total.check(self.dataset.config.max_invalid_fraction, sum(order.num_shards for order in self._orders))

    def _tokens(self) -> list[int]:
        """Tokens of each dataset that this rank's lanes took."""
        return [sum(lane.tokens[i] for lane in self.lanes.values()) for i in range(len(self._orders))]

    def _states(self) -> list[LaneState]:
        return [lane.state() for lane in self.lanes.values()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all lanes, and everything that defines their order. Collective. Equal on all ranks."""
        return {
            **self._definition(self.position),
            "position": self.position,
            "files": [[[asdict(file) for file in group] for group in groups] for groups in self.generations],
            "lanes": [state for states in self._gather(self._last.state) for state in states],
        }

    def _definition(self, before: int) -> dict[str, object]:
        return {
            "streamed": True,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "num_lanes": self.num_lanes,
            "block_rows": self.config.block_rows,
            "settings": [stream.settings for stream in self.dataset.streams],
            "shares": [[first, list(shares)] for first, shares in self._phases if first < before or not first],
        }

    def load_state_dict(self, state: dict[str, Any], *, accept_new_data: bool = False) -> bool:
        """Continue from `state`, or from the start of new data. Return whether the data are new.

        Raises RunError if known files changed or are missing, or if settings differ, unless `accept_new_data`.
        """
        self._forget()
        try:
            generations = self._known(state)
        except (RunError, DataError):
            if not accept_new_data:
                raise
            return True
        self.generations = generations
        self._open()
        self.position = int(state["position"])
        for number, lane in self.lanes.items():
            lane.load(state["lanes"][number])
        self._last = _Step([], {}, self._states(), self._tokens(), LeftOut())
        return False

    def _known(self, state: dict[str, Any]) -> Generations:
        """Return the files of the state, with those that are new since as another group of each dataset."""
        if not state.get("streamed"):
            raise _mismatch("the checkpoint was trained on prepared data, and this run streams them")
        current = self._definition(int(state["position"]))
        changed = [key for key, value in current.items() if state[key] != value]
        if changed:
            changes = ", ".join(f"{key} was {state[key]}, is {current[key]}" for key in changed)
            raise _mismatch(
                f"the data changed since the checkpoint, so the run cannot resume at its position: {changes}"
            )
        return [
            list(_grown(stream.source.name, groups, list(itertools.chain(*found))))
            for stream, groups, found in zip(self.dataset.streams, state["files"], self.generations, strict=True)
        ]

    def _forget(self) -> None:
        """Drop what was prepared ahead."""
        if self._ahead is not None:
            self._ahead.result()
        self._ahead = None

    def new_files(self) -> int:
        """Return how many files are new since the checkpoint."""
        every = zip(self.dataset.streams, self.generations, strict=True)
        return sum(len(groups[-1]) for stream, groups in every if stream.source.grows and len(groups) > 1)

    def close(self) -> None:
        """Stop the threads. Blocks that are being built are not used."""
        for stream in self.dataset.streams:
            stream.source.close()
        for pool in (self._stepper, self._readers):
            pool.shutdown(wait=False, cancel_futures=True)


def _grown(
    dataset: str, groups: Sequence[Sequence[dict[str, Any]]], found: Sequence[KnownFile]
) -> Iterator[list[KnownFile]]:
    by_name = {file.name: file for file in found}
    known = [[KnownFile(**file) for file in group] for group in groups]
    for file in (file for group in known for file in group):
        now = by_name.get(file.name)
        if now is None:
            raise DataError(
                f"{file.name} of {dataset} was read before the checkpoint, but does not exist anymore",
                code="missing_file",
                keys=("data.path",),
                fix=_NEW_DATA,
            )
        if now != file:
            raise _mismatch(f"{file.name} of {dataset} changed since the checkpoint")
    yield from known
    names = {file.name for group in known for file in group}
    if new := [file for file in found if file.name not in names]:
        yield new


def _mismatch(message: str) -> RunError:
    return RunError(message, code="checkpoint_mismatch", keys=("data",), fix=_NEW_DATA)
