"""Packing: every label once, nothing too long, the published example, and the fill of the reference sets."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from automodel_cli.config.errors import DataError
from automodel_cli.data.packing import Packed, Pieces, best_fit_decreasing, cut_long, pack
from automodel_cli.data.preparation.packed_rows import length_histogram
from tests.errors import raises


def log_normal(number: int) -> np.ndarray:
    """Document lengths with mean 351 and median 212."""
    sigma = np.sqrt(2 * np.log(351 / 212))
    lengths = np.random.default_rng(0).lognormal(np.log(212), sigma, number)
    return np.maximum(1, lengths).astype(np.int64)


def rows_of(packed: Packed) -> list[list[tuple[int, int, int]]]:
    """Rows as lists of (document, start, length)."""
    pieces = list(zip(*(a.tolist() for a in vars(packed.pieces).values()), strict=True))
    bounds = packed.row_offsets.tolist()
    return [pieces[a:b] for a, b in itertools.pairwise(bounds)]


def check_every_label_once(packed: Packed, lengths: np.ndarray, seq_len: int) -> None:
    """By brute force: mark each label of each document, refuse a second mark, and leave none unmarked.

    The first token of a document is no label. It stands in one piece.
    """
    seen = [np.zeros(n, int) for n in lengths]
    for row in rows_of(packed):
        assert row, "an empty row"
        assert sum(length for _, _, length in row) <= seq_len
        for document, start, length in row:
            assert length >= 1 and start + length <= lengths[document]
            seen[document][start + (start > 0) : start + length] += 1
    assert all((marks == 1).all() for marks in seen)


def slow_best_fit(lengths: list[int], capacity: int) -> int:
    """Bins that best-fit decreasing needs, the textbook way."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(capacity - length)
    return len(rooms)


@pytest.mark.smoke
@pytest.mark.parametrize("packing", ["best_fit", "wrapped", "none"])
@pytest.mark.parametrize("seed", range(8))
def test_every_token_is_trained_in_exactly_one_row(packing, seed):
    rng = np.random.default_rng(seed)
    seq_len = int(rng.integers(2, 40))
    lengths = rng.integers(1, 60, int(rng.integers(1, 80)))
    pieces = cut_long(lengths, seq_len, "split")
    check_every_label_once(pack(pieces, seq_len, packing), lengths, seq_len)
    whole = Pieces(np.arange(len(lengths)), np.zeros_like(lengths), lengths)
    check_every_label_once(pack(whole, seq_len, "wrapped"), lengths, seq_len)


def test_wrapped_cuts_documents_longer_than_a_row_itself():
    lengths = np.array([5, 2, 3, 1])
    whole = Pieces(np.arange(4), np.zeros(4, np.int64), lengths)
    rows = rows_of(pack(whole, 4, "wrapped"))
    assert rows == [[(0, 0, 4)], [(0, 3, 2), (1, 0, 2)], [(2, 0, 3)], [(3, 0, 1)]]


def test_published_example_truncated_and_split():
    """The bins of another packer's documentation; within a row ours keeps the order of the data."""
    lengths = np.array([5, 2, 3, 1])  # [1..5] [6,7] [8,9,10] [11]
    truncated = rows_of(pack(cut_long(lengths, 4, "truncate"), 4, "best_fit"))
    assert [[(d, n) for d, _, n in row] for row in truncated] == [[(0, 4)], [(2, 3), (3, 1)], [(1, 2)]]
    split = rows_of(pack(cut_long(lengths, 4, "split"), 4, "best_fit"))
    assert [[(d, s, n) for d, s, n in row] for row in split] == [
        [(0, 0, 4)],
        [(2, 0, 3), (3, 0, 1)],
        [(0, 3, 2), (1, 0, 2)],
    ]


@pytest.mark.parametrize("seed", range(20))
def test_needs_as_many_bins_as_textbook_best_fit_decreasing(seed):
    rng = np.random.default_rng(100 + seed)
    capacity = int(rng.integers(5, 300))
    lengths = rng.integers(1, capacity + 1, 300)
    bins = best_fit_decreasing(lengths, capacity)
    assert bins.max() + 1 == slow_best_fit(lengths.tolist(), capacity)
    assert np.bincount(bins, weights=lengths).max() <= capacity


@pytest.mark.parametrize("seq_len", [2048, 4096])
def test_fill_of_the_log_normal_set(seq_len):
    packed = pack(cut_long(log_normal(100_000), seq_len, "split"), seq_len, "best_fit")
    assert packed.fill(seq_len) >= 0.999


def test_fill_of_the_hard_set():
    lengths = np.random.default_rng(0).integers(int(0.2 * 2048), int(0.7 * 2048) + 1, 20_000)
    packed = pack(cut_long(lengths, 2048, "error"), 2048, "best_fit")
    assert packed.fill(2048) >= 0.986


def test_what_happens_to_long_documents():
    lengths = np.array([3, 10, 4])
    assert cut_long(lengths, 4, "drop").document.tolist() == [0, 2]
    assert cut_long(lengths, 4, "truncate").length.tolist() == [3, 4, 4]
    split = cut_long(lengths, 4, "split")
    assert (split.document.tolist(), split.start.tolist()) == ([0, 1, 1, 1, 2], [0, 0, 3, 6, 0])
    assert split.length.tolist() == [3, 4, 4, 4, 4]
    with raises(DataError, "sequence_length", values=("1 of 3", "seq_len=4", "10 tokens"), fix="data.seq_len=10"):
        cut_long(lengths, 4, "error")


def test_lengths_that_no_bin_holds_are_our_bug():
    with pytest.raises(ValueError, match=r"lengths 1\.\.5 do not fit"):
        best_fit_decreasing(np.array([1, 5]), 4)


@pytest.mark.parametrize("longest", [1, 7, 32, 33, 5000])
def test_every_document_is_in_one_bin_of_the_histogram_of_lengths(longest: int) -> None:
    lengths = np.random.default_rng(longest).integers(1, longest + 1, 999)
    found = length_histogram(lengths)
    edges, counts = found["edges"], found["counts"]
    assert len(counts) <= 33 and edges[0] == 0 and edges[-1] >= lengths.max()
    for begin, end, count in zip(edges, edges[1:], counts, strict=False):
        last = end == edges[-1]
        assert count == sum(begin <= length < end or (last and length == end) for length in lengths.tolist())
