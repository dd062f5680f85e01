"""The order in which the sequences of a run are used: an endless stream of indices, the same on any number of ranks.

Each dataset is traversed separately, in a new order on every pass, and no sequence repeats before its pass ends. The
two streams differ in how they mix these traversals. `EpochStream` takes given numbers of passes and shuffles them
together. `TokenBlend` keeps given shares of the tokens at every position.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from automodel_cli.data.mixture import Mixture

_ROWS_PER_CHUNK = 4096
_CHUNKS_KEPT = 4


def shuffled(number: int, *seeds: int) -> np.ndarray:
    """A permutation of `range(number)` that depends on the seeds only.

    Uses raw counter bits instead of `Generator.permutation`, whose stream may change between numpy versions. A resumed
    run must see the same order.
    """
    words = np.random.SeedSequence([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds]).generate_state(2, np.uint64)
    return np.argsort(np.random.Philox(key=words).random_raw(number), kind="stable")


class RowStream(Protocol):
    """Endless stream of sequence indices."""

    rows_per_epoch: int

    def rows(self, start: int, number: int) -> np.ndarray:
        """Return the indices at the positions `start ... start + number - 1`."""

    def definition(self, before: int) -> list[object]:
        """Return what determines the positions below `before`, as JSON values."""


def row_stream(
    lengths: Sequence[np.ndarray], mixture: Mixture, *, seed: int, shuffle: bool, rows_per_step: int
) -> RowStream:
    """Return the stream of a mixture.

    Args:
        lengths: tokens of each sequence, by dataset. Indices count the sequences of all datasets in this order.
        mixture: passes or shares of each dataset.
        seed: of every order.
        shuffle: false keeps the order of each dataset.
        rows_per_step: sequences of an optimizer step, which convert steps of a curriculum to positions.
    """
    order = _Order(lengths, seed, shuffle)
    if not mixture.phases:
        return EpochStream(order, mixture.epochs)
    phases = [(step * rows_per_step, shares) for step, shares in mixture.phases]
    counts = [len(of) for of in lengths], [int(of.sum()) for of in lengths]
    return TokenBlend(order, lengths, phases, max(1, round(math.fsum(mixture.rows_per_epoch(*counts)))))


class _Order:
    """Traversals of the datasets: the indices of pass n of dataset i."""

    def __init__(self, lengths: Sequence[np.ndarray], seed: int, shuffle: bool):
        self.sizes = [len(of) for of in lengths]
        self.first = np.cumsum([0, *self.sizes]).tolist()
        self.seed, self.shuffle = seed, shuffle

    def local(self, source: int, nth: int) -> np.ndarray:
        """Return the order of a pass, as indices within the dataset."""
        size = self.sizes[source]
        return shuffled(size, self.seed, 2, source, nth) if self.shuffle else np.arange(size)


# Example: datasets of 4 and 3 sequences (indices 0 to 3 and 4 to 6), epochs 0.5 and 2, without shuffling. An epoch
# takes 2 and 6 sequences: 0 1 4 5 6 4 5 6, then 2 3 4 5 6 4 5 6.
class EpochStream:
    """An epoch holds `round(epochs * rows)` sequences of every dataset, at least one, shuffled together.

    It takes the next sequences of each traversal: with 0.5, two epochs together use every sequence once.
    """

    def __init__(self, order: _Order, epochs: Sequence[float]):
        self._of = order
        self.takes = [max(1, round(w * n)) for w, n in zip(epochs, order.sizes, strict=True)]
        self.rows_per_epoch = sum(self.takes)
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def definition(self, before: int) -> list[object]:
        return list(self.takes)

    def rows(self, start: int, number: int) -> np.ndarray:
        out = []
        while number:
            epoch, offset = divmod(start, self.rows_per_epoch)
            part = self._epoch_order(epoch)[offset : offset + number]
            out.append(part)
            start, number = start + len(part), number - len(part)
        return np.concatenate(out)

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            parts = [self._source_rows(source, epoch) for source in range(len(self.takes))]
            order = np.concatenate(parts)
            if self._of.shuffle:
                order = order[shuffled(len(order), self._of.seed, 1, epoch)]
            self._epoch, self._order = epoch, order
        return self._order

    def _source_rows(self, source: int, epoch: int) -> np.ndarray:
        size, take = self._of.sizes[source], self.takes[source]
        # Positions of this epoch in an endless traversal of the dataset. Each pass over it has an order of its own.
        positions = np.arange(epoch * take, (epoch + 1) * take)
        passes, rows = positions // size, positions % size
        for nth in np.unique(passes).tolist():
            chosen = passes == nth
            rows[chosen] = self._of.local(source, nth)[rows[chosen]]
        numbers: np.ndarray = rows + self._of.first[source]
        return numbers


class _Pass(NamedTuple):
    """One pass over a dataset: its local indices, and twice the number of tokens up to the middle of each."""

    nth: int
    rows: np.ndarray
    middles_2: np.ndarray


@dataclass(frozen=True)
class _Place:
    """Beginning of a chunk: position, phase and number of the chunk in it, sequences taken of each dataset, and tokens
    of each dataset taken before the phase."""

    position: int
    phase: int
    chunk: int
    taken: tuple[int, ...]
    base: tuple[int, ...]


class TokenBlend:
    """Shares of the tokens, exact to about one sequence at every position of the stream.

    A sequence is due when its dataset has used its share up to the middle of the sequence. Example with the shares 3/4
    and 1/4: a sequence that covers the tokens 300 to 400 of the first dataset is due at token 350 / (3/4) of the run,
    one that covers 100 to 200 of the second at 150 / (1/4). Sequences are used in the order in which they are due. A
    dataset with share s has therefore contributed s * n of the first n tokens, up to about a sequence, as in weighted
    fair queuing (Demers et al., 1989). A curriculum counts anew from the first position of each phase.
    """

    def __init__(
        self,
        order: _Order,
        lengths: Sequence[np.ndarray],
        phases: Sequence[tuple[int, Sequence[float]]],
        rows_per_epoch: int,
    ):
        self._of, self._lengths, self.phases, self.rows_per_epoch = order, lengths, phases, rows_per_epoch
        self._tokens = [int(of.sum()) for of in lengths]
        mean = max(1.0, sum(self._tokens) / max(1, sum(order.sizes)))
        self._chunk_tokens = int(_ROWS_PER_CHUNK * mean)
        self._passes: dict[int, _Pass] = {}
        nothing = (0,) * len(lengths)
        self._start = _Place(0, 0, 0, nothing, nothing)
        self._next = self._start
        self._chunks: OrderedDict[int, np.ndarray] = OrderedDict()

    def definition(self, before: int) -> list[object]:
        return [[first, list(shares)] for first, shares in self.phases if first < before or not first]

    def rows(self, start: int, number: int) -> np.ndarray:
        out = []
        while number:
            first, chunk = self._chunk_with(start)
            part = chunk[start - first : start - first + number]
            out.append(part)
            start, number = start + len(part), number - len(part)
        return np.concatenate(out)

    def _chunk_with(self, position: int) -> tuple[int, np.ndarray]:
        for first, chunk in self._chunks.items():
            if first <= position < first + len(chunk):
                return first, chunk
        if position < self._next.position:
            self._next = self._start
        while True:
            first, chunk = self._next.position, self._advance()
            if position < first + len(chunk):
                self._chunks[first] = chunk
                if len(self._chunks) > _CHUNKS_KEPT:
                    self._chunks.popitem(last=False)
                return first, chunk

    def _advance(self) -> np.ndarray:
        """Return the indices that are due in the next `_chunk_tokens` tokens, and move on."""
        place, (_, shares) = self._next, self.phases[self._next.phase]
        # A chunk has the sequences of all datasets that are due before the horizon. Chunks make the order a function of
        # the position: the stream can start anywhere, and stores one chunk instead of an epoch.
        horizon = (place.chunk + 1) * self._chunk_tokens
        taken = list(place.taken)
        rows, due, sources = [], [], []
        for source, share in enumerate(shares):
            while share:
                nth, offset = divmod(taken[source], self._of.sizes[source])
                this = self._pass(source, nth)
                # All numbers are doubled, so that the middle of a sequence of odd length is an integer and comparisons
                # are exact.
                before_2 = 2 * (nth * self._tokens[source] - place.base[source])
                stop = max(offset, int(np.searchsorted(this.middles_2, 2 * horizon * share - before_2)))
                rows.append(this.rows[offset:stop] + self._of.first[source])
                due.append((this.middles_2[offset:stop] + before_2) / share)
                sources.append(np.full(stop - offset, source))
                taken[source] += stop - offset
                if stop < self._of.sizes[source]:
                    break
        order = np.argsort(np.concatenate(due), kind="stable")
        chunk = np.concatenate(rows)[order]
        self._next = replace(place, position=place.position + len(chunk), chunk=place.chunk + 1, taken=tuple(taken))
        if place.phase + 1 < len(self.phases) and self._next.position >= self.phases[place.phase + 1][0]:
            end = self.phases[place.phase + 1][0]
            # A new phase begins inside the chunk. The rest of it is not used, and is planned again with the new shares.
            chunk = chunk[: end - place.position]
            used = np.bincount(np.concatenate(sources)[order][: len(chunk)], minlength=len(shares))
            now = tuple((np.array(place.taken) + used).tolist())
            self._next = _Place(end, place.phase + 1, 0, now, tuple(map(self._tokens_of, range(len(now)), now)))
        return chunk

    def _tokens_of(self, source: int, taken: int) -> int:
        """Return the tokens of the first `taken` sequences of a dataset's traversal."""
        nth, offset = divmod(taken, self._of.sizes[source])
        rows = self._pass(source, nth).rows[:offset]
        return nth * self._tokens[source] + int(self._lengths[source][rows].sum())

    def _pass(self, source: int, nth: int) -> _Pass:
        known = self._passes.get(source)
        if known is None or known.nth != nth:
            rows = self._of.local(source, nth)
            lengths = self._lengths[source][rows].astype(np.int64)
            # Lengths 100, 300 end at 100, 400. Their middles are 50 and 250, doubled 100 and 500 = 2 * 400 - 300.
            known = self._passes[source] = _Pass(nth, rows, 2 * np.cumsum(lengths) - lengths)
        return known
