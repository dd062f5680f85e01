"""Packed sequences by number: their tokens, documents and targets, and statistics of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from automodel_cli.config.errors import DataError
from automodel_cli.data.mixture import Mixture
from automodel_cli.data.storage.indexed_store import IndexedStore
from automodel_cli.data.storage.memmap_store import PackedStore

_TAUGHT = 0.01
"""A token counts as a learned stop token if it ends at least this fraction of the trained turns."""
Store = PackedStore | IndexedStore
DUMMY_ROW = -1
"""Index of a padding sequence without labels, for ranks that would have one sequence less."""


def length_histogram(lengths: np.ndarray) -> dict[str, object]:
    """`text`, `edges` and `counts` of at most 32 equal bins from 0 to the longest."""
    longest = int(lengths.max(initial=1))
    width = -(-longest // min(32, longest))
    edges = np.arange(0, longest + width, width)
    counts, _ = np.histogram(lengths, edges)
    median = int(np.median(lengths)) if len(lengths) else 0
    text = f"{len(lengths):,} documents by tokens, median {median:,}, longest {longest:,}"
    return {"text": text, "edges": edges.tolist(), "counts": counts.tolist()}


class PackedRows:
    """Packed sequences of one or more datasets with consecutive indices."""

    def __init__(
        self, stores: Sequence[Store], mixture: Mixture, *, row_len: int | None, cross_documents: bool = False
    ):
        """`row_len`: tokens of every sequence. None: as many as its documents have. `cross_documents`: a sequence is
        one document, with labels across the boundaries of its documents."""
        self.stores, self.mixture, self.row_len, self.cross_documents = list(stores), mixture, row_len, cross_documents
        self.first_rows = np.cumsum([0, *(store.num_rows for store in stores)])
        kinds = {store.kind for store in stores}
        if len(kinds) > 1:
            raise DataError(
                f"the datasets of a run must have one kind, but these contain {' and '.join(sorted(kinds))}",
                code="wrong_data_kind",
                keys=("data.datasets",),
                fix="train on pairs and on judged responses in separate runs",
            )
        self.kind: str = kinds.pop()
        lengths = [np.diff(store.offsets[store.row_offsets]) for store in stores]
        self.token_starts = np.cumsum(np.concatenate([[0], *lengths])).astype(np.int64)

    def __len__(self) -> int:
        return int(self.first_rows[-1])

    @property
    def contents(self) -> list[tuple[str, str]]:
        """Files and content hash of every dataset."""
        return [(", ".join(store.meta["files"]), store.content) for store in self.stores]

    def statistics(self) -> list[dict[str, object]]:
        """Statistics of each dataset: name, document (or piece) lengths, trained fraction of its tokens and filled
        fraction of its sequences, in 0..1."""
        statistics_of_sources = []
        for store, (name, _) in zip(self.stores, self.contents, strict=True):
            num_tokens = int(store.offsets[-1])
            trained = int(store.num_label_tokens.sum()) / max(1, num_tokens)
            fill = num_tokens / (self.row_len * store.num_rows) if self.row_len and store.num_rows else None
            statistics_of_sources.append(
                {"name": name, "trained": trained, "fill": fill, **length_histogram(np.diff(store.offsets))}
            )
        return statistics_of_sources

    def units_per_row(self) -> tuple[str, float]:
        """Return the unit that sequences hold (`documents`, `pairs` or `responses`), and the mean number per sequence.

        Sequences are weighted as in an epoch. Each piece of a split document counts.
        """
        num_rows = np.array([store.num_rows for store in self.stores])
        num_pieces = np.array([len(store.offsets) - 1 for store in self.stores])
        num_tokens = np.array([int(store.offsets[-1]) for store in self.stores])
        used = np.array(self.mixture.rows_per_epoch(num_rows.tolist(), num_tokens.tolist()))
        mean = float((used * num_pieces / np.maximum(num_rows, 1)).sum() / used.sum()) if used.sum() else 0.0
        if self.kind == "groups":
            queries = np.array([int((store.roles == 0).sum()) for store in self.stores])
            return "queries", float((used * queries / np.maximum(num_rows, 1)).sum() / max(used.sum(), 1))
        if self.kind in ("documents", "labeled"):
            return ("texts" if self.kind == "labeled" else "documents"), mean
        return ("pairs" if self.kind == "pairs" else "responses"), mean / 2

    @property
    def row_lengths(self) -> np.ndarray:
        """Tokens of each sequence, int64 (sequences,)."""
        lengths: np.ndarray = np.diff(self.token_starts)
        return lengths

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences. Sequence r has `token_starts[r]` to `token_starts[r + 1]`."""
        return int(self.token_starts[-1])

    def taught_stops(self) -> list[int]:
        """Return the special tokens that end trained turns, each at least 1% of a dataset's, most frequent first."""
        ends = [(token, count, s.meta["num_turns"]) for s in self.stores for token, count in s.meta["turn_ends"]]
        return list(dict.fromkeys(token for token, count, total in ends if count >= _TAUGHT * total))

    def largest_id(self) -> tuple[int, str]:
        """Return the largest token id of all rows, and the file and line of a document that holds it."""
        return max((store.largest() for store in self.stores), key=lambda found: found[0])

    def locate(self, row: int) -> tuple[Store, int]:
        """Return the dataset of a sequence, and its number there."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        source = int(np.searchsorted(self.first_rows, row, side="right")) - 1
        return self.stores[source], row - int(self.first_rows[source])

    def tokens(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ids, label mask (1 if the next token has loss) and document bounds, from 0 to the sequence length."""
        store, local = self.locate(row)
        ids, mask, bounds = store.row(local)
        if self.cross_documents and len(bounds) > 2:
            mask = mask.copy()
            mask[bounds[1:-1] - 1] = 1  # the first token of the next document is a label
            bounds = bounds[[0, -1]]
        return ids, mask, bounds

    def documents(self, row: int) -> list[tuple[str, int]]:
        """Return file name and line of each document (or piece) of the sequence, in order."""
        store, local = self.locate(row)
        pieces = slice(int(store.row_offsets[local]), int(store.row_offsets[local + 1]))
        names = [store.meta["files"][i] for i in store.files[pieces].tolist()]
        return list(zip(names, store.lines[pieces].tolist(), strict=True))

    def roles(self, row: int) -> np.ndarray:
        """Return the role of each document of a sequence with preferences, see `PackedStore`."""
        store, local = self.locate(row)
        return store.roles[int(store.row_offsets[local]) : int(store.row_offsets[local + 1])]

    def margins(self, row: int) -> np.ndarray:
        """Return the margin of each document's pair, fp32. 0 if its dataset has none."""
        store, local = self.locate(row)
        pieces = slice(int(store.row_offsets[local]), int(store.row_offsets[local + 1]))
        return store.margins[pieces] if len(store.margins) else np.zeros(pieces.stop - pieces.start, np.float32)

    @property
    def judgements(self) -> set[int]:
        """Ratings that occur in the data: 1 good, 0 bad."""
        return {int(role) for store in self.stores for role in np.unique(store.roles) if role >= 0}

    @property
    def has_margins(self) -> bool:
        """Whether any pair has a margin."""
        return any(len(store.margins) > 0 for store in self.stores)

    def describe(self, row: int) -> str:
        """Return the origin of a sequence, for messages: `train.jsonl:18, 44`."""
        if row == DUMMY_ROW:
            return "(padding)"
        by_file: dict[str, list[int]] = {}
        for name, line in self.documents(row):
            if line not in by_file.setdefault(name, []):
                by_file[name].append(line)
        return "; ".join(f"{name}:{', '.join(map(str, sorted(lines)))}" for name, lines in by_file.items())

    def num_label_tokens(self, row: int) -> int:
        """Return the number of trained tokens of a sequence."""
        store, local = self.locate(row)
        joins = int(store.row_offsets[local + 1] - store.row_offsets[local]) - 1 if self.cross_documents else 0
        return int(store.num_label_tokens[local]) + joins

    def mean_context(self) -> float:
        """Mean length of the document of a token, for the cost of attention."""
        of_documents = (self.row_lengths,) if self.cross_documents else [np.diff(s.offsets) for s in self.stores]
        lengths = np.concatenate(of_documents).astype(np.float64)
        return float((lengths**2).sum() / lengths.sum())

    def targets(self, row: int) -> np.ndarray:
        """Return the target of each document of a row with labeled texts, (documents, outputs) or (documents, 1)."""
        store, local = self.locate(row)
        assert isinstance(store, PackedStore), "files of token ids have no labels"
        return store.targets[int(store.row_offsets[local]) : int(store.row_offsets[local + 1])]

    def classes(self, row: int) -> np.ndarray:
        """Return the class of each token of a row with labeled words."""
        store, local = self.locate(row)
        assert isinstance(store, PackedStore), "files of token ids have no labels"
        bounds = store.offsets[store.row_offsets[local : local + 2]]
        return store.classes[int(bounds[0]) : int(bounds[1])]

    @property
    def labels(self) -> dict[str, Any]:
        """`LabelSpec` of labeled rows, as a dict."""
        found: dict[str, Any] = self.stores[0].meta["row_spec"]
        return found
