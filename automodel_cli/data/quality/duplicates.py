"""Exact and near duplicates as clusters: for each row, the first row of its cluster.

Near duplicates are found by locality-sensitive hashing of MinHash signatures (Broder 1997; Leskovec et al., Mining of
Massive Datasets, chapter 3). Rows with an equal band of hashes are candidates. Of each band, a row is compared with the
first and the previous row with the same hashes, by the share of equal hashes of the whole signatures, which estimates
the Jaccard similarity of their shingles.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from automodel_cli.data.quality.row_features import NUM_HASHES
from automodel_cli.data.quality.words import Hashes, mixed

_RECALL = 0.95
_CHUNK = 1 << 14


def exact_clusters(digest_R2: np.ndarray) -> np.ndarray:
    """Return for each row the first row with the same digest, int64 (rows,)."""
    # Sorting puts equal digests next to each other: rows a b a b give [0, 1, 0, 1], the first row of each digest.
    order = np.lexsort((digest_R2[:, 1], digest_R2[:, 0]))
    same = np.zeros(len(order), bool)
    same[1:] = (digest_R2[order[1:]] == digest_R2[order[:-1]]).all(1)
    first_R = np.empty(len(order), np.int64)
    first_R[order] = order[_begins(same)]
    return first_R


def _begins(same: np.ndarray) -> np.ndarray:
    """Return for each entry the index of the first of its run. `same`: whether it continues the run before."""
    # same = [0, 1, 1, 0, 1] gives [0, 0, 0, 3, 3].
    begins: np.ndarray = np.maximum.accumulate(np.where(same, 0, np.arange(len(same))))
    return begins


def bands_for(similarity: float) -> tuple[int, int]:
    """Return number and size of the bands: the largest bands that make 95% of the pairs with this similarity
    candidates. A pair is a candidate with probability `1 - (1 - similarity ** size) ** number`."""
    # Similarity 0.8 and 128 hashes: 18 bands of 7. A pair with similarity 0.8 is a candidate with probability 0.99, a
    # pair with 0.5 with 0.13. Candidates are then compared by all hashes.
    for size in range(NUM_HASHES, 1, -1):
        number = NUM_HASHES // size
        if 1 - (1 - similarity**size) ** number >= _RECALL:
            return number, size
    return NUM_HASHES, 1


class Signatures:
    """MinHash signatures in files, by row."""

    def __init__(self, files: Sequence[tuple[Path, int]]):
        self._mapped = [np.memmap(path, np.uint32, "r", shape=(n, NUM_HASHES)) for path, n in files if n]
        self._first = np.cumsum([0, *(len(part) for part in self._mapped)])

    def take(self, rows_R: np.ndarray) -> np.ndarray:
        """Return the signatures of rows in any order, uint32 (rows, NUM_HASHES)."""
        out = np.empty((len(rows_R), NUM_HASHES), np.uint32)
        files = np.searchsorted(self._first, rows_R, "right") - 1
        for number in np.unique(files).tolist():
            at = files == number
            out[at] = self._mapped[number][rows_R[at] - self._first[number]]
        return out

    def band(self, begin: int, end: int) -> Hashes:
        """Return the hash of the hashes `begin ... end - 1` of every row, uint64 (rows,)."""
        return np.concatenate([_hashed(part[:, begin:end]) for part in self._mapped])


def _hashed(band_RH: np.ndarray) -> Hashes:
    hashes = np.zeros(len(band_RH), np.uint64)
    for values in band_RH.T:
        hashes = mixed(hashes ^ values.astype(np.uint64))
    return hashes


def near_clusters(signatures: Signatures, rows_U: np.ndarray, similarity: float, num_rows: int) -> np.ndarray:
    """Return for each row the first row of its cluster, int64 (rows,).

    Args:
        rows_U: rows to compare, ascending: the first of each set of exact duplicates.
        similarity: smallest estimated Jaccard similarity of two neighbors in a cluster.
    """
    parent = np.arange(num_rows)
    number, size = bands_for(similarity)
    for band in range(number):
        hashes_U = signatures.band(band * size, (band + 1) * size)[rows_U]
        order = np.argsort(hashes_U, kind="stable")
        same = np.zeros(len(order), bool)
        same[1:] = hashes_U[order[1:]] == hashes_U[order[:-1]]
        begins, members = _begins(same), np.flatnonzero(same)
        # Each member of a run of equal band hashes is paired with the first one and with the one before it. All pairs
        # of a run of 1,000 rows would be half a million.
        pairs = np.concatenate([np.stack([begins[members], members]), np.stack([members - 1, members])], axis=1)
        pairs_2P = np.unique(rows_U[order[pairs]], axis=1)
        for begin in range(0, pairs_2P.shape[1], _CHUNK):
            _join(parent, signatures, pairs_2P[:, begin : begin + _CHUNK], similarity)
    for row in rows_U.tolist():
        parent[row] = _root(parent, row)
    return parent


def _join(parent: np.ndarray, signatures: Signatures, pairs_2P: np.ndarray, similarity: float) -> None:
    """Join the clusters of the pairs that are similar."""
    equal = (signatures.take(pairs_2P[0]) == signatures.take(pairs_2P[1])).mean(1)
    for a, b in pairs_2P[:, equal >= similarity].T.tolist():
        # The smaller row becomes the root, so a cluster keeps its first row, in whatever order the pairs come.
        low, high = sorted((_root(parent, a), _root(parent, b)))
        parent[high] = low


def _root(parent: np.ndarray, row: int) -> int:
    """Return the first row of the cluster, and shorten the way to it."""
    # Path halving: each visited row points to its grandparent afterwards.
    while parent[row] != row:
        parent[row] = row = int(parent[parent[row]])
    return row
