"""Measure the quality of datasets: the result of all checks on all rows, and the rows to remove."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from automodel_cli.data.quality.duplicates import Signatures, exact_clusters, near_clusters
from automodel_cli.data.quality.options import QualityOptions
from automodel_cli.data.quality.overlap import EvaluationIndex
from automodel_cli.data.quality.row_features import FeatureReader, Features, InvalidRow, read_features
from automodel_cli.data.quality.row_text import RowText
from automodel_cli.data.row_errors import DAMAGED
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.sources.sources import Source, first_rows

BYTES_PER_TOKEN = 4
"""Of the estimated number of tokens."""


@dataclass(frozen=True)
class Quality:
    """Features of all rows, and the results that need all of them. Rows are numbered over all datasets.

    Attributes:
        exact_R: first row with the same roles and texts, int64 (rows,).
        near_R: first row of the cluster of near duplicates, exact ones included. Equal to `exact_R` without the check.
    """

    options: QualityOptions
    sources: Sequence[Source]
    features: Sequence[Features]
    index: EvaluationIndex | None
    exact_R: np.ndarray
    near_R: np.ndarray

    @cached_property
    def source_R(self) -> np.ndarray:
        """Dataset of each row."""
        return np.repeat(np.arange(len(self.features)), [len(part) for part in self.features])

    def column(self, name: str) -> np.ndarray:
        """Return a column of `Features.columns` of all datasets."""
        return np.concatenate([part.columns[name] for part in self.features])

    @cached_property
    def size_R(self) -> np.ndarray:
        """Bytes of the text of each row."""
        return self.column("size").astype(np.int64)

    def num_tokens(self, chosen_R: np.ndarray) -> int:
        """Return the estimated tokens of the chosen rows."""
        return int(self.size_R[chosen_R].sum()) // BYTES_PER_TOKEN

    def where(self, row: int) -> str:
        """Return file and line of a row."""
        number = int(self.source_R[row])
        local = row - int(np.searchsorted(self.source_R, number))
        columns = self.features[number].columns
        return f"{self.sources[number].files[columns['file'][local]]}:{columns['line'][local]}"

    @property
    def invalid(self) -> list[tuple[Source, InvalidRow]]:
        """Rows that could not be read, with their datasets."""
        return [(s, row) for s, part in zip(self.sources, self.features, strict=True) for row in part.invalid]

    @property
    def damaged(self) -> list[str]:
        """Files that could not be read to their ends."""
        return [f"{source.files[row.file]}:{row.line}" for source, row in self.invalid if row.code == DAMAGED]

    def flagged(self, check: str) -> np.ndarray:
        """Return the rows that a check of single rows finds: overlap, language or length."""
        options = self.options
        if check == "overlap":
            coverage_R = self.column("coverage")
            found_R = (coverage_R > 0) & (coverage_R >= np.float32(options.overlap))
        elif check == "language":
            found_R = ~np.isin(self.column("language"), np.array(options.languages, "S8"))
        else:
            words_R = self.column("words")
            found_R = (words_R < (options.min_words or 0)) | (words_R > (options.max_words or np.iinfo(np.int64).max))
        return found_R

    def repeats(self, check: str) -> np.ndarray:
        """Return the rows that repeat an earlier one. `near`: that are similar and not equal."""
        rows = np.arange(len(self.exact_R))
        exact_R: np.ndarray = self.exact_R != rows
        similar_R: np.ndarray = (self.near_R != rows) & ~exact_R
        return exact_R if check == "exact" else similar_R

    def removals(self) -> dict[str, np.ndarray]:
        """Return for each reason the rows to remove. Of a cluster, the first row that no other reason removes stays."""
        remove = self.options.remove
        removals: dict[str, np.ndarray] = {}
        removals |= {check: self.flagged(check) for check in ("overlap", "language", "length") if check in remove}
        kept_R = ~np.any([np.zeros(len(self.exact_R), bool), *removals.values()], axis=0)
        for check, clusters_R in (("exact", self.exact_R), ("near", self.near_R)):
            if check in remove or (check == "exact" and "near" in remove):
                rows = np.flatnonzero(kept_R)
                _, firsts = np.unique(clusters_R[rows], return_index=True)
                removals[check] = kept_R.copy()
                removals[check][rows[firsts]] = False
                kept_R &= ~removals[check]
        return removals


def measure(
    sources: Sequence[tuple[SourceConfig, Source]],
    options: QualityOptions,
    index: EvaluationIndex | None,
    *,
    folder: Path,
    choose_workers: Callable[[int], int],
    show: Callable[[str], None],
) -> Quality:
    """Read all rows once and return the results.

    Args:
        index: n-grams of the evaluations. None: without `overlap`.
        folder: of temporary files.
        choose_workers: number of processes for a number of bytes. 0: this process.
        show: receives a line every few seconds.
    """
    features = []
    for number, (config, source) in enumerate(sources):
        text = RowText(config, first_rows(source), source.name)
        reader = FeatureReader(text, frozenset(options.checks), index, folder)
        features.append(read_features(reader, source, number, choose_workers(source.num_bytes), show))
    exact_R = exact_clusters(np.concatenate([part.digest_R2 for part in features]))
    near_R = exact_R
    if "near" in options.checks and len(exact_R):
        signatures = Signatures([entry for part in features for entry in part.signatures])
        rows_U = np.unique(exact_R)
        near_R = near_clusters(signatures, rows_U, options.similarity, len(exact_R))[exact_R]
    return Quality(options, [source for _, source in sources], features, index, exact_R, near_R)
