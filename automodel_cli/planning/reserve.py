"""Usable memory of one GPU, and memory by kind. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CARD_GIB = 79.1
"""What torch can allocate on an H100 or A100 of 80 GB."""
RESERVE_GIB = 5.0
"""CUDA context, cuBLAS workspaces, NCCL buffers and fragmentation, which no count of tensors sees."""


MARGIN = 0.08
"""Of a plan's estimate, for what it gets wrong: bundled recipes agree with their dry runs to 8%."""


def usable_bytes(memory_gib: float) -> float:
    """Bytes that tensors may take of a GPU on which torch can allocate so many GiB; below 0 where there are none."""
    return (memory_gib - RESERVE_GIB) * 2**30


@dataclass(frozen=True)
class MemoryBreakdown:
    """Bytes on one GPU at the worst moment of a step, by kind: estimated by a plan, or measured by a dry run."""

    by_kind: Mapping[str, float]
    peak: float
    """An estimate's kinds may sum to more: they have their largest values at different moments."""
