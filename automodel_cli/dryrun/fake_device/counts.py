"""What a measured step did: kernels, bytes, seconds and synchronizations by name."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass


@dataclass
class Work:
    """Of kernels, one after the other."""

    flops: float = 0.0
    seconds: float = 0.0


class Counts:
    """What the measured step did, by name, and in `warm` what the step before it did."""

    def __init__(self) -> None:
        self.on = False
        self.warm = Work()
        self.syncs: Counter[tuple[str, str]] = Counter()
        self.kernels: Counter[str] = Counter()
        self.moved: defaultdict[str, float] = defaultdict(float)
        """Bytes that they read and write."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.flops = 0.0
        self.front_seconds = 0.0
        """Of kernels of the front end of a vision-language model."""

    def sync(self, what: str, line: str) -> None:
        if self.on:
            self.syncs[what, line] += 1
