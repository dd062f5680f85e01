"""Overlap of training rows with the rows of evaluations, by n-grams of words.

A unit is one text of an evaluation row: a question, an answer, a message, a choice. Units of at least `n` words have
n-grams of `n` words, and shorter ones of `SHORT` words. The coverage of a unit is the share of its n-grams that occur
in a training row (GPT-3, arXiv:2005.14165, appendix C, compares by n-grams of 8 to 13 words).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from automodel_cli.config.errors import DataError
from automodel_cli.data.quality.row_text import values_of
from automodel_cli.data.quality.words import Hashes, WordHasher, ngram_hashes
from automodel_cli.data.row_errors import RowError, SourceRow

SHORT = 8
"""Words of the shortest n-gram. Texts with fewer words are not compared."""
COMMON = 10
"""N-grams in more rows of one evaluation are instructions, and are not compared."""


@dataclass(frozen=True)
class EvaluationSet:
    """An evaluation: its name, the origin of each row, and which rows have no text to compare."""

    name: str
    origins: tuple[str, ...]
    num_too_short: int


@dataclass(frozen=True)
class EvaluationIndex:
    """N-grams of all evaluations, sorted.

    Attributes:
        n: words of an n-gram.
        hashes_G, units_G: n-grams, and the unit of each.
        sizes_U: n-grams of each unit.
        sets_U, rows_U: set and row of each unit.
    """

    n: int
    sets: tuple[EvaluationSet, ...]
    hashes_G: Hashes
    units_G: np.ndarray
    sizes_U: np.ndarray
    sets_U: np.ndarray
    rows_U: np.ndarray

    def covered(self, words_W: Hashes) -> tuple[np.ndarray, np.ndarray]:
        """Return the units that share an n-gram with these words, and their coverage in 0..1."""
        sizes = {self.n, min(self.n, SHORT)}
        grams = np.unique(np.concatenate([ngram_hashes(words_W, size) for size in sizes]))
        begin = np.searchsorted(self.hashes_G, grams)
        begin_H = begin[begin < len(self.hashes_G)]
        begin_H = begin_H[self.hashes_G[begin_H] == grams[: len(begin_H)]]  # both are sorted
        if not len(begin_H):
            return np.zeros(0, np.int64), np.zeros(0)
        end_H = np.searchsorted(self.hashes_G, self.hashes_G[begin_H], "right")
        found = np.concatenate([self.units_G[a:b] for a, b in zip(begin_H.tolist(), end_H.tolist(), strict=True)])
        units, counts = np.unique(found, return_counts=True)
        return units, counts / self.sizes_U[units]

    def origin(self, unit: int) -> str:
        """Return file and line of a unit."""
        return self.sets[int(self.sets_U[unit])].origins[int(self.rows_U[unit])]


def build_index(sets: Iterable[tuple[str, list[str], Iterable[SourceRow]]], n: int) -> EvaluationIndex:
    """Return the index of evaluations, each with its name, its files and its rows. Raises DataError for rows that
    cannot be read, and for an evaluation without a text of `SHORT` words."""
    words_of, found, described = WordHasher(), _Units(), []
    for number, (name, files, rows) in enumerate(sets):
        origins, grams_of_rows = [], []
        for row, source_row in enumerate(rows):
            where = f"{files[source_row.file]}:{source_row.line}"
            if isinstance(source_row.row, RowError):
                raise DataError(f"{where}: {source_row.row.message}", code="bad_rows", fix=source_row.row.fix)
            origins.append(where)
            units = [grams for text in values_of(source_row.row) if len(grams := _ngrams(words_of(text), n))]
            grams_of_rows += [(row, grams) for grams in units]
        compared = found.add(number, grams_of_rows)
        if not compared:
            raise DataError(
                f"no row of {name} has a text of {min(n, SHORT)} words that is not in more than {COMMON} rows",
                code="not_enough_rows",
                keys=("--against",),
            )
        described.append(EvaluationSet(name, tuple(origins), len(origins) - len(compared)))
    return found.index(n, tuple(described))


def _ngrams(words_W: Hashes, n: int) -> Hashes:
    return np.unique(ngram_hashes(words_W, n if len(words_W) >= n else min(n, SHORT)))


class _Units:
    """Collects the units of all evaluations."""

    def __init__(self) -> None:
        self.grams: list[Hashes] = []
        self.sets: list[int] = []
        self.rows: list[int] = []

    def add(self, number: int, units: list[tuple[int, Hashes]]) -> set[int]:
        """Add the units of one evaluation without the n-grams of its instructions. Return the rows that have some."""
        if not units:
            return set()
        rows = np.repeat([row for row, _ in units], [len(grams) for _, grams in units])
        pairs = np.unique(np.stack([np.concatenate([g for _, g in units]), rows.astype(np.uint64)]), axis=1)
        hashes, counts = np.unique(pairs[0], return_counts=True)
        common = hashes[counts > COMMON]
        kept = [(row, grams[~np.isin(grams, common)]) for row, grams in units]
        kept = [(row, grams) for row, grams in kept if len(grams)]
        self.grams += [grams for _, grams in kept]
        self.rows += [row for row, _ in kept]
        self.sets += [number] * len(kept)
        return {row for row, _ in kept}

    def index(self, n: int, sets: tuple[EvaluationSet, ...]) -> EvaluationIndex:
        sizes = np.array([len(grams) for grams in self.grams], np.int64)
        hashes = np.concatenate([np.zeros(0, np.uint64), *self.grams])
        units: np.ndarray[Any, Any] = np.repeat(np.arange(len(sizes)), sizes)
        order = np.argsort(hashes, kind="stable")
        return EvaluationIndex(n, sets, hashes[order], units[order], sizes, np.array(self.sets), np.array(self.rows))
