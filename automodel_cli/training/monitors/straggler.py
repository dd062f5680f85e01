"""Which rank the others wait for: the seconds of each step that a rank was not waiting itself."""

from __future__ import annotations

import torch
from torch import Tensor

_STEPS, _TIMES = 20, 1.25


class SlowRank:
    """Own seconds of every rank, as they come with each step's loss; nothing is fetched before a line is due."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None
        self._steps = 0
        self._told: set[int] = set()

    def add(self, seconds: Tensor) -> dict[str, Tensor]:
        """One step: `seconds` by rank, on any device. Returns columns of its row; empty where there is one rank."""
        if seconds.numel() < 2:
            return {}
        self._sum = seconds if self._sum is None else self._sum + seconds
        self._steps += 1
        most, rank = seconds.max(0)
        return {"rank_busy_seconds_min": seconds.min(), "rank_busy_seconds_max": most, "slowest_rank": rank}

    def warning(self) -> tuple[int, str] | None:
        """A rank that took a quarter more than the median over the last 20 steps or more, and the words; once a rank.

        Waits for the device: ask where a line is due.
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
