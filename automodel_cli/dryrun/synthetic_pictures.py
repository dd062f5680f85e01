"""Pictures in the documents of a dry run: runs of placeholders, and inputs of the shapes that the processor gives.

The image processor runs on white pictures of these sizes, on the CPU. Integers keep their values (grids of patches,
which decide shapes in the tower), pixels are shapes only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.hub.source import composite_config
from automodel_cli.models.vision.probe import probe_pictures
from automodel_cli.models.vision.processor import FamilyProcessor, shared_processor

if TYPE_CHECKING:
    from automodel_cli.models.config import ModelConfig

_WORDS = 8
"""Tokens of text around the pictures of a document."""
_SMALLEST, _LARGEST, _STEP = 32, 4096, 16


class Size(NamedTuple):
    """Of a picture [pixels]."""

    height: int
    width: int


class Document(NamedTuple):
    """A document of a microbatch."""

    tokens: int
    pictures: tuple[Size, ...] = ()


@dataclass(frozen=True)
class PictureColumns:
    """Pictures of one microbatch on the host. `inputs`: integers with values, pixels without (meta tensors)."""

    inputs: dict[str, Tensor]
    placeholder: int
    positions: Tensor | None
    blank_ids: Tensor | None


def processor_of(model: ModelConfig) -> FamilyProcessor | None:
    """Return the processor of a model that reads pictures, after the probe that a run makes. Raises ConfigError."""
    if model.vision is None:
        return None
    processor = shared_processor(model)
    probe_pictures(composite_config(model), processor)
    return processor


def parse_size(text: str) -> Size:
    """Return the size of `WIDTHxHEIGHT`. Raises ConfigError."""
    width, _, height = text.partition("x")
    if width.isdecimal() and height.isdecimal() and int(width) > 0 and int(height) > 0:
        return Size(int(height), int(width))
    raise ConfigError(
        f"--picture {text} must be WIDTHxHEIGHT in pixels", code="wrong_type", keys=("--picture",),
        fix="--picture 1024x768",
    )  # fmt: skip


def assumed_document(processor: FamilyProcessor, tokens: int, limit: int, asked: str | None) -> Document:
    """Return a document of `tokens` tokens that shows as many image tokens as fit, or one picture of the size `asked`.

    It is longer if one picture needs more. Raises ConfigError if that is more than `limit`, the length of a row.
    """
    if asked is not None:
        size, number = parse_size(asked), 1
    else:
        size = _largest(processor, tokens - _WORDS)
        number = max(1, (tokens - _WORDS) // num_tokens(processor, size))
    needed = number * num_tokens(processor, size) + _WORDS
    if needed > limit:
        raise ConfigError(
            f"a picture of {size.width}x{size.height} pixels takes {needed} tokens with {_WORDS} of text, more than a "
            f"row of data.seq_len={limit}",
            code="out_of_range",
            keys=("--picture", "data.seq_len"),
            fix=f"data.seq_len={needed}" if asked is None else "--picture 256x256",
        )
    return Document(max(tokens, needed), (size,) * number)


def _largest(processor: FamilyProcessor, room: int) -> Size:
    """Return the largest square picture with at most `room` tokens; a small one if its tokens do not depend on it."""

    def square(steps: int) -> Size:
        return Size(steps * _STEP, steps * _STEP)

    low, high = _SMALLEST // _STEP, _LARGEST // _STEP
    if num_tokens(processor, square(high)) == num_tokens(processor, square(low)):
        return square(low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if num_tokens(processor, square(middle)) <= room else (low, middle)
    return square(low)


def num_tokens(processor: FamilyProcessor, size: Size) -> int:
    """Return the tokens of a picture, with those that mark its rows and ends."""
    return len(processor.replacement(*size))


def cut(document: Document, tokens: int, processor: FamilyProcessor | None) -> Document:
    """Return the document with at most this many tokens, and with those of its first pictures that fit."""
    if processor is None or document.tokens <= tokens:
        return Document(min(document.tokens, tokens), document.pictures)
    kept, room = [], tokens - _WORDS
    for size in document.pictures:
        room -= num_tokens(processor, size)
        if room < 0:
            break
        kept.append(size)
    return Document(tokens, tuple(kept))


def with_pictures(
    ids: Tensor, rows: Sequence[Sequence[Document]], processor: FamilyProcessor
) -> tuple[Tensor, PictureColumns]:
    """Return the ids with the runs of all pictures, and the pictures of the microbatch.

    Args:
        ids: ids of text, int64 `[B, T]`. Padding stands behind the documents of a row.
    """
    marks = set(processor.replacement(_SMALLEST, _SMALLEST).tolist())
    text = next(number for number in range(len(marks) + 1) if number not in marks)
    ids, tokens = ids.clone(), ids.shape[1]
    ids[torch.isin(ids, torch.tensor(sorted(marks)))] = text
    positions = torch.zeros(3, *ids.shape, dtype=torch.int64)
    for number, row in enumerate(rows):
        for start, document in _starts(row, tokens):
            piece = slice(start, start + document.tokens)
            place = start
            for size in document.pictures:
                run = torch.from_numpy(processor.replacement(*size).astype("int64"))
                ids[number, place : place + len(run)] = run
                place += len(run)
            grids = torch.tensor([processor.grid(*size) for size in document.pictures])
            found = processor.positions(ids[number, piece], grids) if document.pictures else None
            positions[:, number, piece] = torch.arange(document.tokens) if found is None else found
    shown = tuple(size for row in rows for document in row for size in document.pictures)
    blank_ids, blank = (None, {}) if shown else processor.blank()
    inputs = _inputs(processor, shown) if shown else {name: _shape(value) for name, value in blank.items()}
    placeholder = processor.placeholder
    return ids, PictureColumns(inputs, placeholder, positions if processor.has_grid else None, blank_ids)


def _starts(row: Sequence[Document], tokens: int) -> Iterator[tuple[int, Document]]:
    """Yield the documents of a row with their first token, and the padding behind them."""
    start = 0
    for document in row:
        yield start, document
        start += document.tokens
    if start < tokens:
        yield start, Document(tokens - start)


@functools.lru_cache(maxsize=4)
def _inputs(processor: FamilyProcessor, sizes: tuple[Size, ...]) -> dict[str, Tensor]:
    from PIL import Image

    images = [Image.new("RGB", (width, height), (255, 255, 255)) for height, width in sizes]
    return {name: _shape(value) for name, value in processor.inputs(images).items()}


def _shape(value: Tensor) -> Tensor:
    return torch.empty_like(value, device="meta") if value.is_floating_point() else value
