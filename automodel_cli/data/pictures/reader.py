"""Pictures of a batch: pixels from the table, through the family's image processor, with rotary positions.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from automodel_cli.data.batch import Batch, Pictures
from automodel_cli.data.formats.examples import Conversation
from automodel_cli.data.pictures.content import rgb
from automodel_cli.data.pictures.pixels import PixelQueue, num_threads
from automodel_cli.data.pictures.rows import PictureRows
from automodel_cli.data.pictures.storage import PictureList, PictureTable
from automodel_cli.data.row_errors import RowError, unwrap
from automodel_cli.data.tokenized import Encoded, EncodedRow, Unrolled

Shown = tuple[PictureTable | PictureList, int]
"""A picture by its number in a table."""


class PictureProcessor(Protocol):
    """What data preparation needs to know of a family. Implemented by `models/vision/processor.py`."""

    marker: int
    """Id of the token that chat templates write for a picture. Most families use the placeholder."""
    placeholder: int
    """Id of the tokens at which features of pictures are inserted."""
    has_grid: bool
    """Whether the family has rotary positions of time, height and width."""

    def cache_key(self) -> str:
        """Text that changes whenever tokens or pixels of a picture would."""

    def replacement(self, height: int, width: int) -> np.ndarray:
        """Token ids, int32, that replace the one placeholder of a picture of this size."""

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Patches of a picture of this size in time, height and width. Zeros for families that count tokens."""

    def inputs(self, images: Sequence[object]) -> dict[str, Tensor]:
        """Model inputs of RGB pictures, in their order."""

    def positions(self, ids_T: Tensor, grid_N3: Tensor) -> Tensor | None:
        """Rotary positions `[3, T]` of a document that shows pictures with these grids. None for families that count
        tokens."""

    def blank(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Token ids and inputs of one small white picture."""


@dataclass(frozen=True)
class PictureSupport:
    """Pictures of the rows of a run.

    Attributes:
        rows: reads pictures of rows.
        processor: their tokens and pixels.
        max_bytes: largest memory of pixels that were read ahead (`data.picture_memory_gib`).
        image_token_cost: work of tower and projector for an image token, in units of a token of the text model.
        shares: measures whether the tower may read a picture once that a microbatch shows several times.
    """

    rows: PictureRows
    processor: PictureProcessor
    max_bytes: float = 4 << 30
    image_token_cost: float = 0.0
    shares: Callable[[], bool] = lambda: False

    def reader(self, *, repeated: bool) -> PictureReader:
        """Return what adds pictures to the batches of a dataset. `repeated`: rows show a picture several times."""
        cost, shares = self.image_token_cost, repeated and self.shares()
        return PictureReader(self.processor, self.max_bytes, image_token_cost=cost, shares=shares)

    def expanded_prompt(self, chat: Conversation, encoded: np.ndarray | RowError) -> np.ndarray:
        """Return the token ids of a prompt with a run of placeholders for each picture. Raises RowError."""
        ids = unwrap(encoded)
        return self._expanded(chat, Encoded(ids, np.zeros(len(ids), np.uint8)), whole=True).ids

    def expanded(self, chat: Conversation, result: EncodedRow) -> Encoded | Unrolled:
        """Return the encoded conversation with a run of placeholders for each picture, which is not trained."""
        match result:
            case Encoded():
                return self._expanded(chat, result, whole=True)
            case Unrolled(documents):
                return Unrolled(tuple(self._expanded(chat, each, whole=False) for each in documents))
        raise result

    def _expanded(self, chat: Conversation, encoded: Encoded, *, whole: bool) -> Encoded:
        """`whole`: the tokens show all pictures of its row. Raises RowError."""
        places = np.flatnonzero(encoded.ids == self.processor.marker)
        count, given = len(places), chat.pictures
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
            pictures=tuple(
                replace(picture, grid=self.processor.grid(picture.height, picture.width)) for picture in given[:count]
            ),
        )


class PictureReader:
    """Adds pictures to batches."""

    def __init__(
        self,
        processor: PictureProcessor,
        max_bytes: float,
        *,
        blank: bool = False,
        image_token_cost: float = 0.0,
        shares: bool = False,
    ):
        """`blank`: replace every picture by a white one of its size, to measure what a model knows without looking.
        `shares`: a picture that a microbatch shows several times is read once."""
        self.processor, self.max_bytes, self.is_blank = processor, max_bytes, blank
        self.image_token_cost, self.shares = image_token_cost, shares
        self._pixels = PixelQueue(num_threads(), max_bytes)

    def blanked(self) -> PictureReader:
        """Return a reader that replaces every picture by a white one."""
        return PictureReader(self.processor, self.max_bytes, blank=True, shares=self.shares)

    def with_pictures(self, batch: Batch, shown: Sequence[Sequence[Shown]]) -> Batch:
        """Return the batch with the pictures of its documents. `shown`: those of each document, in order.

        Pixels are read when the model asks for them.
        """
        flat = [picture for of_document in shown for picture in of_document]
        placeholder, positions = self.processor.placeholder, self._positions(batch, shown)
        if flat:
            once, shared_P = self._distinct(flat)
            inputs = self._pixels.add(lambda: self.processor.inputs([self._image(picture) for picture in once]))
            return replace(batch, pictures=Pictures(inputs, placeholder, positions, shared_P=shared_P))
        ids_T, blank = self.processor.blank()
        return replace(batch, pictures=Pictures(blank, placeholder, positions, ids_T))

    def with_pixels(self, batch: Batch, shown: Sequence[Sequence[Shown]]) -> Batch:
        """Return the batch as `with_pictures`, with pixels that are read once for several forwards."""
        batch = self.with_pictures(batch, shown)
        assert batch.pictures is not None
        return replace(batch, pictures=replace(batch.pictures, inputs=dict(batch.pictures.inputs.items())))

    def _distinct(self, shown: Sequence[Shown]) -> tuple[Sequence[Shown], Tensor | None]:
        """Return the distinct pictures, and `Pictures.shared_P` if there are fewer."""
        distinct = {(table.folder, number): (table, number) for table, number in shown}
        if not self.shares or len(distinct) == len(shown):
            return shown, None
        lengths = [self.num_placeholders(table.size(number)) for table, number in distinct.values()]
        ranges = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
        of_picture = dict(zip(distinct, ranges, strict=True))
        places = np.concatenate([of_picture[table.folder, number] for table, number in shown])
        return list(distinct.values()), torch.from_numpy(places)

    def num_placeholders(self, size: tuple[int, int]) -> int:
        """Return the number of placeholders of a picture of this height and width."""
        return int((self.processor.replacement(*size) == self.processor.placeholder).sum())

    def _image(self, picture: Shown) -> object:
        table, number = picture
        if self.is_blank:
            from PIL import Image

            height, width = table.size(number)
            return Image.new("RGB", (width, height), (255, 255, 255))
        return rgb(table.content(number))

    def _positions(self, batch: Batch, shown: Sequence[Sequence[Shown]]) -> Tensor | None:
        if not self.processor.has_grid:
            return None
        ids_N, plain_N = batch.input_ids_BT.flatten(), batch.position_ids_BT.flatten()
        padded = [*shown, *([[]] * (batch.num_documents - len(shown)))]
        found = []
        for (start, stop), of_document in zip(itertools.pairwise(batch.cu_seqlens.tolist()), padded, strict=True):
            positions_3T = None
            if of_document:
                grid_N3 = torch.tensor([table.grid(number) for table, number in of_document])
                positions_3T = self.processor.positions(ids_N[start:stop], grid_N3)
            found.append(plain_N[start:stop].expand(3, -1) if positions_3T is None else positions_3T)
        return torch.cat(found, 1).view(3, *batch.shape)
