"""Rows on which an export is compared with the trained model: texts, and a document with pictures.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.data.pictures.content import rgb
from automodel_cli.data.pictures.reader import PictureReader, Shown
from automodel_cli.data.preparation.dataset import PackedDataset
from automodel_cli.models.checkpoint_io.export_values import PictureDocument

if TYPE_CHECKING:
    from automodel_cli.data.preparation.prompt_dataset import PromptDataset
    from automodel_cli.models.vision.processor import FamilyProcessor
    from automodel_cli.run.model_builder import Model

_PROMPT_TOKENS, _SHORT = 128, 16
_NUM_SCANNED, _PICTURE_TOKENS = 200, 2048


def most_tokens(num_prompts: int, *, pictures: bool) -> int:
    """Return the largest number of tokens that are compared."""
    return num_prompts * _PROMPT_TOKENS + (_PICTURE_TOKENS if pictures else 0)


@dataclass(frozen=True)
class ComparedRows:
    """Beginnings of rows as text, and documents with pictures, each also as a batch of the trained model."""

    prompts: list[list[int]]
    documents: tuple[PictureDocument, ...] = ()
    batches: tuple[Batch, ...] = ()

    @classmethod
    def of(cls, rows: PackedDataset | PromptDataset, num_prompts: int) -> ComparedRows:
        """Choose rows of a dataset, or prompts of GRPO.

        Texts have no image tokens, because models differ in what these are without a picture: Gemma 4 reads them as
        padding.
        """
        texts = [rows.tokens(row)[0] for row in range(min(num_prompts, len(rows)))]
        if not isinstance(rows, PackedDataset) or rows.pictures is None:
            return cls([ids[:_PROMPT_TOKENS].tolist() for ids in texts])
        reader = rows.pictures
        placeholder = reader.processor.placeholder
        texts = [ids[ids != placeholder][:_PROMPT_TOKENS] for ids in texts]
        long_enough = [ids for ids in texts if len(ids) >= _SHORT]
        # Prompts of one length form one batch, for which each layer is cast once.
        length = min(map(len, long_enough), default=0)
        prompts = [ids[:length].tolist() for ids in long_enough]
        chosen = _shortest(rows, reader)
        if chosen is None:
            return cls(prompts)
        ids, pictures = chosen
        processor = cast("FamilyProcessor", reader.processor)
        keywords = partial(_keywords, processor, ids, pictures)
        return cls(prompts, (PictureDocument(ids.tolist(), placeholder, keywords),), (_batch(rows, ids, pictures),))

    def score(self, model: Model, prompts: list[list[int]]) -> list[Tensor]:
        """Return log-probs of the tokens after the first that are compared, of texts and documents. Collective."""
        scores = model.score(prompts) if prompts else []
        batches = [batch.to(model.mesh.device) for batch in self.batches]
        if not batches:
            return scores
        found = model.stages.forward(batches, lambda output, _: output.logprobs_BT[0])
        return scores + [
            logprobs_T.cpu()[: len(document.ids) - 1][document.compared]
            for logprobs_T, document in zip(found, self.documents, strict=True)
        ]


def _shortest(rows: PackedDataset, reader: PictureReader) -> tuple[np.ndarray, Sequence[Shown]] | None:
    """Return the shortest document with pictures among the first rows, None if all are too long."""
    best: tuple[np.ndarray, Sequence[Shown]] | None = None
    for row in range(min(len(rows), _NUM_SCANNED)):
        ids_T, _, bounds = rows.tokens(row)
        shown = rows.shown(row, len(bounds) - 1)
        for start, stop, pictures in zip(bounds[:-1], bounds[1:], shown, strict=True):
            limit = _PICTURE_TOKENS if best is None else len(best[0]) - 1
            if not pictures or stop - start > limit:
                continue
            ids = ids_T[start:stop].astype(np.int64)
            count = sum(reader.num_placeholders(table.size(number)) for table, number in pictures)
            if count == (ids == reader.processor.placeholder).sum():
                best = ids, pictures
    return best


def _keywords(processor: FamilyProcessor, ids: np.ndarray, pictures: Sequence[Shown]) -> dict[str, Tensor]:
    images = [rgb(table.content(number)) for table, number in pictures]
    return processor.keywords(torch.from_numpy(ids)[None], images)


def _batch(rows: PackedDataset, ids: np.ndarray, pictures: Sequence[Shown]) -> Batch:
    """Return a row with one document and padding. Its tokens after the first are labels, except image tokens."""
    assert rows.pictures is not None, "it shows pictures"
    tokens = len(ids)
    length = tokens + -tokens % rows.pad_to_multiple_of
    ids_BT = torch.full((1, length), rows.pad_id, dtype=torch.int64)
    ids_BT[0, :tokens] = torch.from_numpy(ids)
    labels_BT = torch.full_like(ids_BT, IGNORE_INDEX)
    labels_BT[0, : tokens - 1] = ids_BT[0, 1:tokens]
    labels_BT[labels_BT == rows.pictures.processor.placeholder] = IGNORE_INDEX
    bounds = [0, tokens] if tokens == length else [0, tokens, length]
    batch = Batch(
        input_ids_BT=ids_BT,
        labels_BT=labels_BT,
        position_ids_BT=torch.cat([torch.arange(tokens), torch.arange(length - tokens)])[None],
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_seqlen=max(tokens, length - tokens),
        row_ids_B=torch.full((1,), -1),
    )
    return rows.pictures.with_pixels(batch, [pictures] if tokens == length else [pictures, []])
