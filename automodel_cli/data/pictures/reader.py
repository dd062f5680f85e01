"""Pictures of a batch: pixels from the table, through the family's image processor, with rotary positions.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from automodel_cli.data.batch import Batch, Pictures
from automodel_cli.data.pictures.content import rgb
from automodel_cli.data.pictures.rows import PictureRows
from automodel_cli.data.pictures.storage import PictureTable
from automodel_cli.data.row_errors import RowError
from automodel_cli.data.tokenized import Encoded, Unrolled

_MOST_THREADS = 8


class PictureProcessor(Protocol):
    """What data preparation needs to know of a family. Implemented by `models/vision/processor.py`."""

    placeholder: int
    """Id of the tokens at which features of pictures are inserted."""
    has_grid: bool
    """Whether the family has rotary positions of time, height and width."""

    def cache_key(self) -> str:
        """Text that changes whenever tokens or pixels of a picture would."""

    def replacement(self, height: int, width: int) -> np.ndarray:
        """Token ids, int32, that replace the one placeholder of a picture of this size."""

    def inputs(self, images: Sequence[Any]) -> dict[str, Tensor]:
        """Model inputs of RGB pictures, in their order."""

    def positions(self, ids_T: Tensor, inputs: dict[str, Tensor], first: int, count: int) -> Tensor | None:
        """Rotary positions `[3, T]` of a document that shows the pictures `first` to `first + count` of `inputs`.
        None for families that count tokens."""

    def blank(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Token ids and inputs of one small white picture."""


@dataclass(frozen=True)
class PictureSupport:
    """Pictures of the rows of a run.

    Attributes:
        rows: reads pictures of rows.
        processor: their tokens and pixels.
    """

    rows: PictureRows
    processor: PictureProcessor

    def expanded(self, document: Any, result: Any) -> Any:
        """Return the encoded conversation with a run of placeholders for each picture, which is not trained."""
        if isinstance(result, Unrolled):
            return Unrolled(tuple(self._expanded(document, each, whole=False) for each in result.documents))
        return self._expanded(document, result, whole=True) if isinstance(result, Encoded) else result

    def _expanded(self, document: Any, encoded: Encoded, *, whole: bool) -> Encoded:
        """`whole`: the document shows all pictures of its row. Raises RowError."""
        places = np.flatnonzero(encoded.ids == self.processor.placeholder)
        count, given = len(places), document.pictures
        if count > len(given) or (whole and count < len(given)):
            raise RowError(
                "image_count",
                f"the chat template renders {count} placeholders for the {len(given)} pictures of the row",
                fix="data.chat_template=<a .jinja file that renders image parts>",
            )
        if not count:
            return encoded
        ids, trained = [], []
        for start, stop, picture in zip([0, *(places + 1)], places, given, strict=False):
            run = self.processor.replacement(picture.height, picture.width)
            ids += [encoded.ids[start:stop], run]
            trained += [encoded.trained[start:stop], np.zeros(len(run), np.uint8)]
        rest = slice(int(places[-1]) + 1, None)
        return replace(
            encoded,
            ids=np.concatenate([*ids, encoded.ids[rest]]).astype(np.int32),
            trained=np.concatenate([*trained, encoded.trained[rest]]),
            pictures=tuple(given[:count]),
        )


class PictureReader:
    """Adds pictures to batches."""

    def __init__(self, processor: PictureProcessor, *, blank: bool = False):
        """`blank`: replace every picture by a white one of its size, to measure what a model knows without looking."""
        self.processor, self.is_blank = processor, blank
        threads = min(_MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))
        self._threads = ThreadPoolExecutor(threads, "pictures")

    def with_pictures(self, batch: Batch, shown: Sequence[Sequence[tuple[PictureTable, int]]]) -> Batch:
        """Return the batch with the pictures of its documents. `shown`: those of each document, in order."""
        flat = [picture for of_document in shown for picture in of_document]
        if flat:
            inputs = self.processor.inputs(list(self._threads.map(self._image, flat)))
            pictures = Pictures(inputs, self.processor.placeholder, self._positions(batch, shown, inputs))
        else:
            ids_T, inputs = self.processor.blank()
            positions = self._positions(batch, shown, inputs)
            pictures = Pictures(inputs, self.processor.placeholder, positions, ids_T)
        return replace(batch, pictures=pictures)

    def _image(self, picture: tuple[PictureTable, int]) -> Any:
        table, number = picture
        if self.is_blank:
            from PIL import Image

            height, width = table.size(number)
            return Image.new("RGB", (width, height), (255, 255, 255))
        return rgb(table.content(number))

    def _positions(self, batch: Batch, shown: Sequence[Sequence[Any]], inputs: dict[str, Tensor]) -> Tensor | None:
        if not self.processor.has_grid:
            return None
        ids_N = batch.input_ids_BT.flatten()
        plain_N = batch.position_ids_BT.flatten()
        found, first = [], 0
        counts = [len(of_document) for of_document in shown] + [0] * (batch.num_documents - len(shown))
        for (start, stop), count in zip(itertools.pairwise(batch.cu_seqlens.tolist()), counts, strict=True):
            positions_3T = self.processor.positions(ids_N[start:stop], inputs, first, count) if count else None
            found.append(plain_N[start:stop].expand(3, -1) if positions_3T is None else positions_3T)
            first += count
        return torch.cat(found, 1).view(3, *batch.shape)
