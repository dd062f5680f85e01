"""Concrete integer values for fake tensors.

Floats of a dry run are only shapes, but what depends on data (label positions, document bounds, tokens per expert) must
take its true path. So every fake tensor of integers or booleans that is computed from known ones has a real twin on
the CPU.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

KINDS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
LARGEST = 1 << 23
"""Elements: twins of larger results are not made."""


class Twins:
    """Fake tensor -> its real twin, for as long as the fake one lives."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def get(self, fake: Tensor) -> Tensor | None:
        entry = self._known.get(id(fake))
        return entry[1] if entry is not None and entry[0]() is fake else None

    def put(self, fake: Tensor, real: Tensor) -> None:
        key = id(fake)

        def gone(_: object, known: dict[int, tuple[weakref.ref[Tensor], Tensor]] = self._known) -> None:
            known.pop(key, None)

        self._known[key] = (weakref.ref(fake, gone), real)
