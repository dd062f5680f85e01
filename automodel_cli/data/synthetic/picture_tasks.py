"""Pictures drawn in code with questions about them, for runs that download nothing.

A picture has 2 x 2 to 3 x 3 cells of 16 pixels with two to five shapes in four colors. Questions: how many circles,
which shape is red, which color has the square. Validation pictures are drawn from another seed, and a picture that
occurs in both splits is left out of training. Torch-free.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.json_reader import Row

if TYPE_CHECKING:
    from PIL import ImageDraw

_VERSION = 1
_CELL = 16
_COLORS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (230, 200, 40)}
_SHAPES = ("circle", "square", "triangle")
_KINDS = ("count", "shape", "color")
Cells = dict[tuple[int, int], tuple[str, str]]
"""(row, column) -> (color, shape)"""
WORDS = ("how", "many", "what", "shape", "color", "is", "the", "?", *_COLORS, *_SHAPES, *map(str, range(6)))
"""All words of questions and answers."""


@dataclass(frozen=True)
class PictureTasks:
    """Rows with one picture, one question and one answer of one word."""

    num_train: int = 12_000
    """Number of training rows."""
    num_validation: int = 400
    """Number of validation rows."""
    seed: int = 0
    """Seed of the pictures and questions."""

    def __post_init__(self) -> None:
        for name, least in (("num_train", 1), ("num_validation", 0)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"{name}={getattr(self, name)} must be at least {least}",
                    code="out_of_range",
                    keys=(name,),
                    fix=f"{name}={least}",
                )

    def rows(self, split: Literal["train", "validation"]) -> Iterator[Row]:
        """The rows of one split, the same for the same node."""
        if split == "validation":
            for size, cells, rng in self._validation():
                yield _row(size, cells, rng)
            return
        held_out = {_identity(size, cells) for size, cells, _ in self._validation()}
        rng, made = random.Random(f"{self.seed} train"), 0
        while made < self.num_train:
            size, cells = _drawn(rng)
            if _identity(size, cells) not in held_out:
                made += 1
                yield _row(size, cells, rng)

    def _validation(self) -> Iterator[tuple[tuple[int, int], Cells, random.Random]]:
        rng = random.Random("held out pictures")
        for number in range(self.num_validation):
            yield *_drawn(rng), random.Random(f"{number} of validation")

    def cache_key(self) -> str:
        """Hex digest of everything that decides the rows."""
        text = json.dumps({"class": type(self).__name__, "version": _VERSION, **asdict(self)}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _drawn(rng: random.Random) -> tuple[tuple[int, int], Cells]:
    height, width = rng.choice(((2, 2), (2, 3), (3, 2), (3, 3)))
    places = rng.sample([(i, j) for i in range(height) for j in range(width)], rng.randint(2, min(height * width, 5)))
    return (height, width), {place: (rng.choice(list(_COLORS)), rng.choice(_SHAPES)) for place in places}


def _identity(size: tuple[int, int], cells: Cells) -> str:
    return json.dumps([size, sorted(cells.items())])


def _row(size: tuple[int, int], cells: Cells, rng: random.Random) -> dict[str, object]:
    question, answer = _question(cells, rng)
    content = [{"type": "image", "bytes": _png(size, cells)}, {"type": "text", "text": question}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "answer": answer}


def _question(cells: Cells, rng: random.Random) -> tuple[str, str]:
    kind = rng.choice(_KINDS)
    if kind == "count":
        shape = rng.choice(_SHAPES)
        return f"how many {shape} ?", str(sum(found == shape for _, found in cells.values()))
    given = 0 if kind == "shape" else 1  # what the question names: the color, or the shape
    names = [cell[given] for cell in cells.values()]
    once = [cell for cell in cells.values() if names.count(cell[given]) == 1]
    if not once:
        return _question(cells, rng)
    color, shape = rng.choice(once)
    return (f"what shape is {color} ?", shape) if kind == "shape" else (f"what color is the {shape} ?", color)


def _png(size: tuple[int, int], cells: Cells) -> bytes:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (size[1] * _CELL, size[0] * _CELL), (255, 255, 255))
    draw = ImageDraw.Draw(image)
    for (row, column), (color, shape) in cells.items():
        _draw(draw, shape, _COLORS[color], column * _CELL, row * _CELL)
    stream = io.BytesIO()
    image.save(stream, "PNG")
    return stream.getvalue()


def _draw(draw: ImageDraw.ImageDraw, shape: str, color: tuple[int, int, int], x: int, y: int) -> None:
    left, top, right, bottom = x + 2, y + 2, x + _CELL - 3, y + _CELL - 3
    if shape == "circle":
        draw.ellipse((left, top, right, bottom), fill=color)
    elif shape == "square":
        draw.rectangle((left, top, right, bottom), fill=color)
    else:
        draw.polygon([(left, bottom), (right, bottom), ((left + right) // 2, top)], fill=color)
