"""Long matrices, halved: two sizes of a world take turns over the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turns(rows: Sequence[T], world: int, family: int, sizes: tuple[int, int] = (2, 4)) -> list[T]:
    """Every second row on one size of the world, the others on the other; for the next family the other way round.

    So each family meets every row and every row both sizes, at half the cost of the product. The innermost factor of
    `rows` should have an odd length, else a size sees only some of its values.
    """
    shift = sizes.index(world) + family
    return [row for i, row in enumerate(rows) if (i + shift) % 2 == 0]
