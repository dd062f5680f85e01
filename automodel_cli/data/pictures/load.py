"""Amount of pictures in data, for the work of a tower."""

from __future__ import annotations

from typing import NamedTuple


class PictureLoad(NamedTuple):
    """Sums over pictures.

    Attributes:
        patches: patches that pass through the tower. 0: unknown, for families without grids.
        tokens: image tokens, which replace the placeholders.
        pairs: patches squared, by picture. 0: unknown.
    """

    patches: float
    tokens: float
    pairs: float
