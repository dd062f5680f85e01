"""Packed sequences as a dataset: collated to microbatches without a loop over tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.data.formats.base import PREFERENCES
from automodel_cli.data.head_output import LOSS_WEIGHTS, SOURCES
from automodel_cli.data.mixture import Mixture
from automodel_cli.data.pictures.load import PictureLoad
from automodel_cli.data.pictures.reader import PictureReader
from automodel_cli.data.pictures.storage import PictureTable
from automodel_cli.data.preparation.packed_rows import DUMMY_ROW, PackedRows, Store
from automodel_cli.data.storage.memmap_store import PackedStore


class PackedDataset(PackedRows):
    """Packed sequences of one or more datasets with consecutive indices, and their microbatches."""

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
        super().__init__(stores, mixture, row_len=row_len, cross_documents=cross_documents)
        self.pictures, self.pad_id, self.pad_to_multiple_of = pictures, pad_id, pad_to_multiple_of
        self._sources = np.arange(len(stores)) if sources is None else np.array(sources, np.int64)
        self._columns: dict[str, np.ndarray] = {}

    def attach(self, name: str, values: np.ndarray) -> None:
        """Add the column `extra[name]` to every batch: one or several values for each of the `num_tokens`."""
        assert len(values) == self.num_tokens, f"{values.shape} values for {self.num_tokens} tokens"
        self._columns[name] = values

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
        store, local = self.locate(row)
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
