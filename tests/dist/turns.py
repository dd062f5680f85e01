"""Long matrices, quartered: two sizes of a world and the families take turns over the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turns(rows: Sequence[T], world: int, family: int, sizes: tuple[int, int] = (2, 4)) -> list[T]:
    """Every fourth row on one size of the world, every fourth on the other; the next families take the rows between.

    So four families meet every row on both sizes, each family half of the rows, at a quarter of the cost of the
    product. The innermost factor of `rows` should have an odd length, else a size sees only some of its values.
    """
    shift = 2 * sizes.index(world) + family
    return [row for i, row in enumerate(rows) if (i + shift) % 4 == 0]
