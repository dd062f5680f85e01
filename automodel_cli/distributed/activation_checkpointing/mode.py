"""Which layers `activation_checkpointing` recomputes. Torch-free."""

from __future__ import annotations

import re

_SOME = re.compile(r"full:(\d+)/(\d+)")


def recomputed_of(mode: bool | int | str) -> tuple[int, int]:
    """Return (k, n): of every n layers k are recomputed. `full:k/n` names them, a number n is 1 of n."""
    if isinstance(mode, str):
        some = _SOME.fullmatch(mode)
        return (int(some[1]), int(some[2])) if some else (1, 1)
    return (1, int(mode)) if mode else (0, 1)


def is_recomputed(layer: int, mode: bool | int | str) -> bool:
    """Return whether a layer is, by its place in its pipeline stage. They are spread evenly."""
    k, n = recomputed_of(mode)
    return layer * k % n < k


def is_some(mode: object) -> bool:
    """Return whether `mode` is `full:k/n` with 0 < k <= n."""
    some = _SOME.fullmatch(str(mode))
    return some is not None and 0 < int(some[1]) <= int(some[2])
