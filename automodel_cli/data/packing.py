"""Which documents share a row: index arithmetic only, no tokens are touched.

Best-fit decreasing on counts. Documents of equal length are interchangeable, and so are bins with equal room, so the
packer never looks at one document: it walks over lengths from long to short and moves whole groups of bins from one
amount of room to another. On 100,000 documents there are a few thousand such moves.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from automodel_cli.config.errors import DataError
from automodel_cli.data.config import LongDocuments, Packing


@dataclass(frozen=True)
class Pieces:
    """Stretches of documents that will stand in rows: `document[i]` from token `start[i]`, `length[i]` tokens. All
    int64.
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray

    def take(self, order: np.ndarray) -> Pieces:
        """These pieces in another order, or some of them."""
        return Pieces(self.document[order], self.start[order], self.length[order])


@dataclass(frozen=True)
class Packed:
    """Rows of pieces: row r holds `pieces[row_offsets[r]:row_offsets[r + 1]]`, one after the other."""

    pieces: Pieces
    row_offsets: np.ndarray

    @property
    def num_rows(self) -> int:
        """Rows in all."""
        return len(self.row_offsets) - 1

    def fill(self, seq_len: int) -> float:
        """Share of the rows' `seq_len` places that hold a token."""
        return float(self.pieces.length.sum()) / max(1, self.num_rows * seq_len)


def cut_long(lengths: np.ndarray, seq_len: int, choice: LongDocuments, instead: LongDocuments = "split") -> Pieces:
    """Documents as pieces of at most `seq_len` tokens. `split` loses no token; `truncate` keeps the first `seq_len`.

    Raises DataError for `fail` when a document is longer, with `instead` as its fix.
    """
    document = np.arange(len(lengths), dtype=np.int64)
    lengths = lengths.astype(np.int64)
    is_long = lengths > seq_len
    if choice == "error" and is_long.any():
        raise DataError(
            f"{int(is_long.sum()):,} of {len(lengths):,} documents are longer than seq_len={seq_len} (the longest has "
            f"{int(lengths.max()):,} tokens)",
            code="sequence_length",
            keys=("data.seq_len", "data.truncation"),
            fix=f"data.seq_len={int(lengths.max())}, or data.truncation={instead}",
        )
    if choice == "drop":
        document = document[~is_long]
        return Pieces(document, np.zeros_like(document), lengths[document])
    if choice == "truncate":
        return Pieces(document, np.zeros_like(document), np.minimum(lengths, seq_len))
    num_pieces = -(-lengths // seq_len)
    document = np.repeat(document, num_pieces)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    start = nth * seq_len
    return Pieces(document, start, np.minimum(lengths[document] - start, seq_len))


def pack(pieces: Pieces, seq_len: int, packing: Packing) -> Packed:
    """Place every piece in a row. Pieces longer than `seq_len` are allowed only for `wrapped`, which cuts them."""
    if packing == "none":
        return Packed(pieces, np.arange(len(pieces.length) + 1, dtype=np.int64))
    if packing == "wrapped":
        return _wrap(pieces, seq_len)
    rows = best_fit_decreasing(pieces.length, seq_len)
    order = np.argsort(rows, kind="stable")
    num_rows = int(rows.max()) + 1 if len(rows) else 0
    row_offsets = np.searchsorted(rows[order], np.arange(num_rows + 1)).astype(np.int64)
    return Packed(pieces.take(order), row_offsets)


def _wrap(pieces: Pieces, seq_len: int) -> Packed:
    """All tokens in the documents' order, cut at every multiple of `seq_len`; a cut document starts anew in the next
    row.
    """
    ends = np.cumsum(pieces.length)
    total = int(ends[-1]) if len(ends) else 0
    row_starts = np.arange(0, total, seq_len, dtype=np.int64)
    bounds = np.union1d(row_starts, ends[pieces.length > 0] - pieces.length[pieces.length > 0])
    source = np.searchsorted(ends, bounds, side="right")
    start = pieces.start[source] + bounds - (ends - pieces.length)[source]
    length = np.diff(np.append(bounds, total))
    row_offsets = np.append(np.searchsorted(bounds, row_starts), len(bounds)).astype(np.int64)
    return Packed(Pieces(pieces.document[source], start, length), row_offsets)


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """The bin of each document, int64: longest first, each into the open bin with the least room that holds it.

    `lengths` must lie in 1..capacity. Equal lengths keep their order, so the result is the same on every machine.
    """
    if len(lengths) and (lengths.min() < 1 or lengths.max() > capacity):
        raise ValueError(f"lengths {int(lengths.min())}..{int(lengths.max())} do not fit bins of 1..{capacity}")
    shortness = capacity - lengths
    small = shortness.astype(np.uint16) if capacity < 2**16 else shortness  # numpy sorts 16-bit integers by radix
    order = np.argsort(small, kind="stable")
    counts = np.bincount(lengths, minlength=capacity + 1)
    bin_of = np.empty(len(lengths), np.int64)
    open_bins: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]  # by room: stacks of groups of bins
    rooms: list[int] = []  # the amounts of room that some open bin has, ascending
    num_bins = placed = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        left = int(counts[length])
        while left:
            at = bisect_left(rooms, length)
            if at == len(rooms):
                room = capacity
                needed = -(-left // (room // length))
                group = np.arange(num_bins, num_bins + needed)
                num_bins += needed
            else:
                room = rooms[at]
                group = open_bins[room].pop()
                if not open_bins[room]:
                    rooms.pop(at)
            left, placed = _fill_group(group, room, length, left, placed, order, bin_of, open_bins, rooms)
    return bin_of


def _fill_group(
    group: np.ndarray,
    room: int,
    length: int,
    left: int,
    placed: int,
    order: np.ndarray,
    bin_of: np.ndarray,
    open_bins: list[list[np.ndarray]],
    rooms: list[int],
) -> tuple[int, int]:
    """Put documents of one length into bins of one room: as many as fit into the first bin, then the next.

    Returns how many of this length are left and how many documents are placed in all.
    """
    per_bin = room // length
    num_full = min(len(group), left // per_bin)
    rest = left % per_bin if num_full < len(group) else 0
    touched = num_full + (rest > 0)
    for bins, each in ((group[:num_full], per_bin), (group[num_full:touched], rest), (group[touched:], 0)):
        if not len(bins):
            continue
        taken = len(bins) * each
        bin_of[order[placed : placed + taken]] = np.repeat(bins, each)
        placed, left = placed + taken, left - taken
        remaining = room - each * length
        if remaining:
            if not open_bins[remaining]:
                insort(rooms, remaining)
            open_bins[remaining].append(bins)
    return left, placed


def in_halves(packed: Packed, first_lengths: np.ndarray) -> Packed:
    """The same rows with every piece, which is two documents that stay together, as two: the first document of piece i
    has `first_lengths[i]` tokens.
    """
    pieces = packed.pieces
    lengths = np.stack([first_lengths, pieces.length - first_lengths], 1).ravel()
    starts = np.stack([pieces.start, pieces.start + first_lengths], 1).ravel()
    return Packed(Pieces(np.repeat(pieces.document, 2), starts, lengths), packed.row_offsets * 2)
