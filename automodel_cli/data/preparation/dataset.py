"""Packed sequences as a dataset: memory-mapped, indexed by number, collated without a loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from automodel_cli.config.errors import DataError
from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.data.formats.base import PREFERENCES
from automodel_cli.data.head_output import LOSS_WEIGHTS, SOURCES
from automodel_cli.data.mixture import Mixture
from automodel_cli.data.pictures.load import PictureLoad
from automodel_cli.data.pictures.reader import PictureReader
from automodel_cli.data.pictures.storage import PictureTable
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


class PackedDataset:
    """Packed sequences of one or more datasets with consecutive indices."""

    def __init__(
        self,
        stores: Sequence[Store],
        mixture: Mixture,
        *,
        sources: Sequence[int] | None = None,
        pad_id: int,
        row_len: int | None,
        pad_to_multiple_of: int = 1,
        pictures: PictureReader | None = None,
        cross_documents: bool = False,
    ):
        """`row_len`: tokens of every sequence. None: the longest of the microbatch, rounded up to
        `pad_to_multiple_of`. `sources`: index in `mixture` of each store, -1 for none. None: the stores in order.
        `pictures`: adds the pictures of rows to batches. `cross_documents`: a sequence is one document, with labels
        across the boundaries of its documents."""
        self.pictures, self.cross_documents = pictures, cross_documents
        self.stores, self.mixture = list(stores), mixture
        self._sources = np.arange(len(stores)) if sources is None else np.array(sources, np.int64)
        self.pad_id, self.row_len, self.pad_to_multiple_of = pad_id, row_len, pad_to_multiple_of
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
        self._columns: dict[str, np.ndarray] = {}

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
        used = self.mixture.rows_per_epoch(num_rows, num_tokens)
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

    def attach(self, name: str, values: np.ndarray) -> None:
        """Add the column `extra[name]` to every batch: one or several values for each of the `num_tokens`."""
        assert len(values) == self.num_tokens, f"{values.shape} values for {self.num_tokens} tokens"
        self._columns[name] = values

    def _locate(self, row: int) -> tuple[Store, int]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        source = int(np.searchsorted(self.first_rows, row, side="right")) - 1
        return self.stores[source], row - int(self.first_rows[source])

    def tokens(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return ids, label mask (1 if the next token has loss) and document bounds, from 0 to the sequence length."""
        store, local = self._locate(row)
        ids, mask, bounds = store.row(local)
        if self.cross_documents and len(bounds) > 2:
            mask = mask.copy()
            mask[bounds[1:-1] - 1] = 1  # the first token of the next document is a label
            bounds = bounds[[0, -1]]
        return ids, mask, bounds

    def documents(self, row: int) -> list[tuple[str, int]]:
        """Return file name and line of each document (or piece) of the sequence, in order."""
        store, local = self._locate(row)
        pieces = slice(int(store.row_offsets[local]), int(store.row_offsets[local + 1]))
        names = [store.meta["files"][i] for i in store.files[pieces].tolist()]
        return list(zip(names, store.lines[pieces].tolist(), strict=True))

    def roles(self, row: int) -> np.ndarray:
        """Return the role of each document of a sequence with preferences, see `PackedStore`."""
        store, local = self._locate(row)
        return store.roles[int(store.row_offsets[local]) : int(store.row_offsets[local + 1])]

    def margins(self, row: int) -> np.ndarray:
        """Return the margin of each document's pair, fp32. 0 if its dataset has none."""
        store, local = self._locate(row)
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
        store, local = self._locate(row)
        joins = int(store.row_offsets[local + 1] - store.row_offsets[local]) - 1 if self.cross_documents else 0
        return int(store.num_label_tokens[local]) + joins

    def mean_context(self) -> float:
        """Mean length of the document of a token, for the cost of attention."""
        of_documents = (self.row_lengths,) if self.cross_documents else [np.diff(s.offsets) for s in self.stores]
        lengths = np.concatenate(of_documents).astype(np.float64)
        return float((lengths**2).sum() / lengths.sum())

    def _with_pictures(self) -> list[PackedStore]:
        """Return the datasets with their own type. Files of token ids have no pictures."""
        return [store for store in self.stores if isinstance(store, PackedStore)]

    def row_costs(self) -> np.ndarray | None:
        """Return the work of each row in tokens of the text model, float64. None if all rows have about the same."""
        if self.pictures is None or not self.pictures.image_token_cost:
            return None
        costs = []
        for store in self._with_pictures():
            starts = store.offsets[store.row_offsets]
            images = np.concatenate([[0], np.cumsum(store.ids == self.pictures.processor.placeholder)])
            lengths = np.diff(starts) if self.row_len is None else np.full(store.num_rows, self.row_len)
            costs.append(lengths + self.pictures.image_token_cost * np.diff(images[starts]))
        return np.concatenate(costs)

    def picture_load(self, example: PictureLoad) -> PictureLoad:
        """Return patches and tokens of all pictures, those that a row shows several times once if the tower reads them
        once. `example`: the load of one picture, whose ratios hold for pictures without a grid."""
        assert self.pictures is not None, "the dataset has pictures"
        stores, placeholder = self._with_pictures(), self.pictures.processor.placeholder
        tokens = sum(int(np.count_nonzero(store.ids == placeholder)) for store in stores)
        patches = [store.patches_of_pictures() for store in stores]
        if self.pictures.shares:
            once = [of[store.distinct_pictures()] for of, store in zip(patches, stores, strict=True)]
            tokens = round(tokens * sum(map(len, once)) / max(1, sum(map(len, patches))))
            patches = once
        patches_P = np.concatenate(patches).astype(np.float64)
        if patches_P.sum():
            return PictureLoad(float(patches_P.sum()), tokens, float((patches_P**2).sum()))
        share = tokens / max(1, example.tokens)
        return PictureLoad(share * example.patches, tokens, share * example.pairs)

    def collate(self, row_indices: Sequence[int]) -> Batch:
        """Return the sequences as one microbatch. `DUMMY_ROW` is a padding sequence.

        Padding at the end of a sequence is a separate document, so no real token attends to it. Pairs have `pairs_P2`
        and `margins_P`, rated responses have `desirable_S`, labeled rows their targets (see `objectives/base.py`).
        """
        rows = [self.tokens(int(row)) if row != DUMMY_ROW else _EMPTY for row in row_indices]
        num_tokens = self.row_len or self._round_up(max(len(ids) for ids, _, _ in rows))
        shape = (len(rows), num_tokens)
        ids_BT = np.full(shape, self.pad_id, np.int64)
        mask_BT = np.zeros(shape, np.uint8)
        starts = []
        for i, (ids, mask, bounds) in enumerate(rows):
            ids_BT[i, : len(ids)] = ids
            mask_BT[i, : len(ids)] = mask
            starts.append(bounds[bounds < num_tokens] + i * num_tokens)
        cu_seqlens = np.concatenate([*starts, [len(rows) * num_tokens]])
        lengths = np.diff(cu_seqlens)
        positions = np.arange(len(rows) * num_tokens) - np.repeat(cu_seqlens[:-1], lengths)
        labels_BT = np.full(shape, IGNORE_INDEX, np.int64)
        labels_BT[:, :-1] = np.where(mask_BT[:, :-1] != 0, ids_BT[:, 1:], IGNORE_INDEX)
        batch = Batch(
            input_ids_BT=torch.from_numpy(ids_BT),
            labels_BT=torch.from_numpy(labels_BT),
            position_ids_BT=torch.from_numpy(positions.reshape(shape)),
            cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
            max_seqlen=int(lengths.max()),
            row_ids_B=torch.tensor([int(row) for row in row_indices], dtype=torch.int64),
            extra={
                **self._of_sources(row_indices),
                **self._preferences(row_indices, [len(of_row) for of_row in starts]),
                **self._groups(row_indices, [len(of_row) for of_row in starts]),
                **self._targets(row_indices, [len(of_row) for of_row in starts], shape),
                **{name: self._column(values, row_indices, shape) for name, values in self._columns.items()},
            },
        )
        if self.pictures is None:
            return batch
        shown = [
            of_document
            for row, of_row in zip(row_indices, starts, strict=True)
            for of_document in self.shown(int(row), len(of_row))
        ]
        return self.pictures.with_pictures(batch, shown)

    def shown(self, row: int, num_documents: int) -> list[list[tuple[PictureTable, int]]]:
        """Return the pictures of each document of a row, the document of padding included."""
        if row == DUMMY_ROW:
            return [[]] * num_documents
        store, local = self._locate(row)
        pieces = range(int(store.row_offsets[local]), int(store.row_offsets[local + 1]))
        found = [store.shown(piece) for piece in pieces]
        return found + [[]] * (num_documents - len(found))

    def _of_sources(self, row_indices: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the dataset and the loss weight of each sequence, if the run has several datasets."""
        if len(self.mixture.names) < 2:
            return {}
        rows = np.array(row_indices, np.int64)
        sources_B = np.where(
            rows == DUMMY_ROW, -1, self._sources[np.searchsorted(self.first_rows, rows, side="right") - 1]
        )
        weights = np.array([*self.mixture.loss_weights, 1.0], np.float32)  # index -1: rows of no dataset
        columns = {SOURCES: torch.from_numpy(sources_B)}
        if (weights != 1).any():
            columns[LOSS_WEIGHTS] = torch.from_numpy(weights[sources_B])
        return columns

    def _column(self, values: np.ndarray, row_indices: Sequence[int], shape: tuple[int, int]) -> torch.Tensor:
        """Return attached values of the sequences, 0 at padding."""
        out_BT = np.zeros((*shape, *values.shape[1:]), values.dtype)
        for i, row in enumerate(row_indices):
            if row != DUMMY_ROW:
                first, last = self.token_starts[int(row) : int(row) + 2]
                out_BT[i, : last - first] = values[first:last]
        return torch.from_numpy(out_BT)

    def _groups(self, row_indices: Sequence[int], counts: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the columns of embedding objectives: role and score of each document."""
        if self.kind != "groups":
            return {}
        roles_S, scores_S = np.full(sum(counts), -1, np.int64), np.zeros(sum(counts), np.float32)
        first = np.cumsum([0, *counts])
        for i, row in enumerate(row_indices):
            if row != DUMMY_ROW:
                roles = self.roles(int(row))
                roles_S[first[i] : first[i] + len(roles)] = roles
                scores_S[first[i] : first[i] + len(roles)] = self.margins(int(row))
        return {"roles_S": torch.from_numpy(roles_S), "scores_S": torch.from_numpy(scores_S)}

    def targets(self, row: int) -> np.ndarray:
        """Return the target of each document of a row with labeled texts, (documents, outputs) or (documents, 1)."""
        store, local = self._locate(row)
        assert isinstance(store, PackedStore), "files of token ids have no labels"
        return store.targets[int(store.row_offsets[local]) : int(store.row_offsets[local + 1])]

    def classes(self, row: int) -> np.ndarray:
        """Return the class of each token of a row with labeled words."""
        store, local = self._locate(row)
        assert isinstance(store, PackedStore), "files of token ids have no labels"
        bounds = store.offsets[store.row_offsets[local : local + 2]]
        return store.classes[int(bounds[0]) : int(bounds[1])]

    @property
    def labels(self) -> dict[str, Any]:
        """`LabelSpec` of labeled rows, as a dict."""
        found: dict[str, Any] = self.stores[0].meta["row_spec"]
        return found

    def _targets(
        self, row_indices: Sequence[int], counts: Sequence[int], shape: tuple[int, int]
    ) -> dict[str, torch.Tensor]:
        """Return the column that classification objectives read."""
        if self.kind != "labeled":
            return {}
        if self.labels["of_tokens"]:
            classes_BT = np.full(shape, -1, np.int64)
            for i, row in enumerate(row_indices):
                if row != DUMMY_ROW:
                    of_row = self.classes(int(row))
                    classes_BT[i, : len(of_row)] = of_row
            return {"class_ids_BT": torch.from_numpy(classes_BT)}
        is_class = self.labels["problem"] == "single_label_classification"
        targets_SL = np.full((sum(counts), 1 if is_class else len(self.labels["names"])), np.nan, np.float32)
        first = np.cumsum([0, *counts])
        for i, row in enumerate(row_indices):
            if row != DUMMY_ROW:
                of_row = self.targets(int(row))
                targets_SL[first[i] : first[i] + len(of_row)] = of_row
        if is_class:
            return {"class_ids_S": torch.from_numpy(np.nan_to_num(targets_SL[:, 0], nan=-1).astype(np.int64))}
        return {"targets_SL": torch.from_numpy(targets_SL)}

    def _preferences(self, row_indices: Sequence[int], counts: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the columns that preference objectives read. `counts`: documents per sequence, including padding."""
        if self.kind not in PREFERENCES:
            return {}
        roles_S = np.full(sum(counts), -1, np.int64)
        margins_S = np.zeros(sum(counts), np.float32)
        first = np.cumsum([0, *counts])
        for i, row in enumerate(row_indices):
            if row != DUMMY_ROW:
                roles = self.roles(int(row))
                roles_S[first[i] : first[i] + len(roles)] = roles
                margins_S[first[i] : first[i] + len(roles)] = self.margins(int(row))
        if self.kind == "judged":
            return {"desirable_S": torch.from_numpy(roles_S)}
        chosen_P = np.flatnonzero(roles_S == 1)
        pairs_P2 = np.stack([chosen_P, chosen_P + 1], 1)
        return {"pairs_P2": torch.from_numpy(pairs_P2), "margins_P": torch.from_numpy(margins_S[chosen_P])}

    def _round_up(self, number: int) -> int:
        return max(self.pad_to_multiple_of, -(-number // self.pad_to_multiple_of) * self.pad_to_multiple_of)


_EMPTY = (np.zeros(0, np.int64), np.zeros(0, np.uint8), np.zeros(1, np.int64))
