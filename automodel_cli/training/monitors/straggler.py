"""Which rank the others wait for: the seconds of each step that a rank was not waiting itself."""

from __future__ import annotations

import torch
from torch import Tensor

_STEPS, _TIMES = 20, 1.25


class SlowRank:
    """Busy seconds of every rank, received with each step's loss. Nothing is fetched before a line is due."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._steps = 0
        self._told: set[int] = set()

    def add(self, seconds: Tensor) -> dict[str, Tensor]:
        """Record one step: `seconds` by rank, on any device. Returns columns of its row; none with one rank."""
        if seconds.numel() < 2:
            return {}
        self._sum = seconds if self._sum is None else self._sum + seconds
        self._steps += 1
        most, rank = seconds.max(0)
        return {"rank_busy_seconds_min": seconds.min(), "rank_busy_seconds_max": most, "slowest_rank": rank}

    def warning(self) -> tuple[int, str] | None:
        """Return a rank that took 25% more than the median over the last 20 or more steps, and a message. Once per
        rank.

        Synchronizes with the device, so call it when a line is due.
        """
        if self._sum is None or self._steps < _STEPS:
            return None
        mean, steps = self._sum / self._steps, self._steps
        self._sum, self._steps = None, 0
        rank = int(mean.argmax())
        others = torch.cat([mean[:rank], mean[rank + 1 :]]).median()
        if rank in self._told or not mean[rank] > _TIMES * others:
            return None
        self._told.add(rank)
        return rank, f"{mean[rank]:.3g} s of its own a step, {others:.3g} s the others (median), over {steps} steps"
