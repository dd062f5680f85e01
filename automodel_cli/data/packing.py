"""Pack documents into sequences of a fixed length. Index arithmetic only: no tokens are read.

`best_fit_decreasing` packs groups instead of single documents. Documents of equal length are interchangeable, and so
are bins with equal free space. The packer iterates over the distinct lengths, longest first, and moves groups of bins
from one amount of free space to another. 100,000 documents need a few thousand moves.

Example with a capacity of 10 and the lengths 6, 6, 3, 3, 3::

    length 6: two new bins, one document each    free space 4, 4
    length 3: one document in each of the two    free space 1, 1
              one new bin for the last document  free space 7
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from automodel_cli.config.errors import DataError
from automodel_cli.data.config import LongDocuments, Packing


@dataclass(frozen=True)
class Pieces:
    """Contiguous parts of documents: piece i has `length[i]` tokens of `document[i]`, from token `start[i]` on.

    All arrays are int64 of shape (pieces,).
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray

    def take(self, order: np.ndarray) -> Pieces:
        """Return the pieces at the indices `order`."""
        return Pieces(self.document[order], self.start[order], self.length[order])


@dataclass(frozen=True)
class Packed:
    """Packed sequences: row r is the concatenation of `pieces[row_offsets[r]:row_offsets[r + 1]]`."""

    pieces: Pieces
    row_offsets: np.ndarray

    @property
    def num_rows(self) -> int:
        """Number of packed rows."""
        return len(self.row_offsets) - 1

    def fill(self, seq_len: int) -> float:
        """Return the fraction of positions that contain a token instead of padding."""
        return float(self.pieces.length.sum()) / max(1, self.num_rows * seq_len)


def cut_long(lengths: np.ndarray, seq_len: int, choice: LongDocuments, instead: LongDocuments = "split") -> Pieces:
    """Return pieces of at most `seq_len` tokens.

    The pieces of a split document overlap by one token: a piece ends with the label of the token before, and the next
    piece begins with that token as input. Every token but the first of the document is therefore a label exactly once.

    Args:
        lengths: tokens of each document.
        seq_len: maximum tokens of a piece.
        choice: `split` keeps all tokens, `truncate` the first `seq_len`, `drop` only documents that fit.
        instead: the choice that the error suggests.

    Raises:
        DataError: `choice` is `error` and a document is longer than `seq_len`.
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
    # Example: a document of 7 tokens a to g and seq_len 4. stride = 3, ceil(6 / 3) = 2 pieces: a b c d and d e f g. The
    # first predicts b c d, the second e f g. A piece of 4 tokens has 3 labels, because nothing follows its last token.
    stride = seq_len - 1
    num_pieces = np.maximum(1, -(-(lengths - 1) // stride))  # ceil
    document = np.repeat(document, num_pieces)
    # Index of each piece within its document: num_pieces [2, 1, 3] gives [0, 1, 0, 0, 1, 2].
    nth = np.arange(len(document)) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    start = nth * stride
    return Pieces(document, start, np.minimum(lengths[document] - start, seq_len))


def pack(pieces: Pieces, seq_len: int, packing: Packing) -> Packed:
    """Assign every piece to a row. Only `wrapped` accepts pieces longer than `seq_len`, and splits them."""
    if packing == "none":
        return Packed(pieces, np.arange(len(pieces.length) + 1, dtype=np.int64))
    if packing == "wrapped":
        return _wrap(pieces, seq_len)
    rows = best_fit_decreasing(pieces.length, seq_len)
    # Example: lengths [3, 6, 3, 6, 3] and seq_len 10 give the rows [0, 0, 1, 1, 2]. The pieces of a row become
    # adjacent, in their original order: row_offsets = [0, 2, 4, 5]. 21 of 30 positions have a token, so the fill is
    # 0.7.
    order = np.argsort(rows, kind="stable")
    num_rows = int(rows.max()) + 1 if len(rows) else 0
    row_offsets = np.searchsorted(rows[order], np.arange(num_rows + 1)).astype(np.int64)
    return Packed(pieces.take(order), row_offsets)


def _wrap(pieces: Pieces, seq_len: int) -> Packed:
    """Concatenate all pieces in order and split the stream every `seq_len - 1` tokens.

    A split document continues in the next row as a new piece, with positions from 0. Its last token in the row is
    repeated there (see `cut_long`). Lengths [3, 5] and `seq_len` 5 give the rows [3, 2] and [4].
    """
    # Example: lengths [3, 5], seq_len 5. ends = [3, 8], row_starts = [0, 4], bounds = [0, 3, 4].
    ends = np.cumsum(pieces.length)
    total = int(ends[-1]) if len(ends) else 0
    row_starts = np.arange(0, total, seq_len - 1, dtype=np.int64)
    document_starts = ends[pieces.length > 0] - pieces.length[pieces.length > 0]
    # Stream positions at which a new piece begins: every row start and every document start.
    bounds = np.union1d(row_starts, document_starts)
    # Piece that contains each bound, and the bound's offset in its document.
    source = np.searchsorted(ends, bounds, side="right")
    start = pieces.start[source] + bounds - (ends - pieces.length)[source]
    length = np.diff(np.append(bounds, total))
    # A piece goes on if its end is no document start: the document continues in the next row. Its last token there is
    # the label of this row's last token, so the piece gets one more token.
    goes_on = ~np.isin(np.append(bounds[1:], total), np.append(document_starts, total))
    # A piece of one token that ends its document is the label of the piece before, and predicts nothing.
    # Example: lengths [5, 3], seq_len 5. The row starts are 0 and 4. The first row has all 5 tokens, the last as a
    # label. The second row would begin with that token alone, and contains only the document of 3.
    used = np.ones(len(bounds), bool)
    used[1:] = ~(goes_on[:-1] & ~goes_on[1:] & (length[1:] == 1))
    parts = Pieces(pieces.document[source], start, length + goes_on).take(np.flatnonzero(used))
    # Rows begin at the bounds that are row starts: pieces 0 and 2 of the example.
    row_offsets = np.append(np.searchsorted(bounds[used], row_starts), used.sum()).astype(np.int64)
    # A row may have lost its only piece. Two equal offsets would be an empty row.
    return Packed(parts, np.unique(row_offsets))


def best_fit_decreasing(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Return the bin index of each document, int64 of shape (documents,).

    Documents are placed longest first, each into the open bin with the least sufficient free space. Equal lengths keep
    their order, so the result is deterministic. The number of bins is at most 11/9 of the optimum plus 4 (Johnson,
    1973).

    Args:
        lengths: document lengths, each between 1 and `capacity`.
        capacity: tokens of a bin.
    """
    if len(lengths) and (lengths.min() < 1 or lengths.max() > capacity):
        raise ValueError(f"lengths {int(lengths.min())}..{int(lengths.max())} do not fit bins of 1..{capacity}")
    # Documents by decreasing length. The sort is stable, so equal lengths keep their order.
    shortness = capacity - lengths
    small = shortness.astype(np.uint16) if capacity < 2**16 else shortness  # numpy sorts 16-bit integers by radix
    order = np.argsort(small, kind="stable")
    # Only the number of documents per length matters for the placement. `order` turns positions back into documents.
    counts = np.bincount(lengths, minlength=capacity + 1)
    bin_of = np.empty(len(lengths), np.int64)
    open_bins: list[list[np.ndarray]] = [
        [] for _ in range(capacity + 1)
    ]  # index: free space; a stack of groups of bins
    free_spaces: list[int] = []  # free spaces for which a bin is open, ascending
    num_bins = placed = 0
    # All documents of one length are placed before the next shorter length.
    for length in np.flatnonzero(counts)[::-1].tolist():
        unplaced = int(counts[length])
        while unplaced:
            # Best fit: the smallest free space that is large enough.
            at = bisect_left(free_spaces, length)
            if at == len(free_spaces):  # no open bin has enough space: open as many as this length needs
                free = capacity
                # Capacity 10, length 3: 3 documents per bin. 7 documents open ceil(7 / 3) = 3 bins at once.
                needed = -(-unplaced // (free // length))
                group = np.arange(num_bins, num_bins + needed)
                num_bins += needed
            else:
                free = free_spaces[at]
                group = open_bins[free].pop()
                if not open_bins[free]:
                    free_spaces.pop(at)
            unplaced, placed = _fill_group(group, free, length, unplaced, placed, order, bin_of, open_bins, free_spaces)
    return bin_of


def _fill_group(
    group: np.ndarray,
    free: int,
    length: int,
    unplaced: int,
    placed: int,
    order: np.ndarray,
    bin_of: np.ndarray,
    open_bins: list[list[np.ndarray]],
    free_spaces: list[int],
) -> tuple[int, int]:
    """Place documents of one length into a group of bins with equal free space, filling one bin after the other.

    The group is divided into full bins, at most one partly filled bin, and untouched bins. Each part is stored under
    its new free space.

    Returns:
        The number of unplaced documents of this length, and the number of documents placed so far.
    """
    # Example: 5 documents of length 3 and a group of 3 bins with 7 free tokens. per_bin = 2, so two bins get 2
    # documents and one bin gets 1. The group becomes two bins with 1 free token and one bin with 4.
    per_bin = free // length
    num_full = min(len(group), unplaced // per_bin)
    rest = unplaced % per_bin if num_full < len(group) else 0
    touched = num_full + (rest > 0)
    for bins, each in ((group[:num_full], per_bin), (group[num_full:touched], rest), (group[touched:], 0)):
        if not len(bins):
            continue
        taken = len(bins) * each
        bin_of[order[placed : placed + taken]] = np.repeat(bins, each)
        placed, unplaced = placed + taken, unplaced - taken
        remaining = free - each * length
        if remaining:
            if not open_bins[remaining]:
                insort(free_spaces, remaining)
            open_bins[remaining].append(bins)
    return unplaced, placed


def in_parts(packed: Packed, lengths: np.ndarray, counts: np.ndarray) -> Packed:
    """Split every piece, which consists of the documents of a group, into its documents.

    Args:
        packed: rows of groups.
        lengths: tokens of each document of all groups.
        counts: number of documents of each group.
    """
    # Example: groups 0 and 1 have documents of 4, 5 and 2, 3 tokens (lengths [4, 5, 2, 3], counts [2, 2]). A row with
    # group 1 and then group 0 has part = [2, 3, 0, 1]: documents of 2, 3, 4, 5 tokens, from tokens 0, 2, 0, 4 of their
    # groups on. Its row_offsets [0, 2] become [0, 4].
    pieces, firsts = packed.pieces, np.cumsum(counts) - counts
    of_piece = counts[pieces.document]
    piece = np.repeat(np.arange(len(of_piece)), of_piece)
    before = np.cumsum(of_piece) - of_piece  # parts before each piece
    part = firsts[pieces.document][piece] + np.arange(len(piece)) - before[piece]
    ends = np.cumsum(lengths[part])
    begins = ends - lengths[part]
    starts = pieces.start[piece] + begins - begins[before[piece]]
    row_offsets = np.concatenate([[0], np.cumsum(of_piece)])[packed.row_offsets]
    return Packed(Pieces(pieces.document[piece], starts, lengths[part]), row_offsets)


def in_halves(packed: Packed, first_lengths: np.ndarray) -> Packed:
    """Split every piece, which consists of the two documents of a pair, into its documents.

    Args:
        packed: rows of pairs.
        first_lengths: tokens of the first document of each piece.
    """
    pieces = packed.pieces
    # A pair of 5 tokens whose first document has 2 gives the pieces (start 0, length 2) and (start 2, length 3).
    lengths = np.stack([first_lengths, pieces.length - first_lengths], 1).ravel()
    starts = np.stack([pieces.start, pieces.start + first_lengths], 1).ravel()
    return Packed(Pieces(np.repeat(pieces.document, 2), starts, lengths), packed.row_offsets * 2)
