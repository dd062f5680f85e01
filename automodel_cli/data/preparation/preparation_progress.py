"""Progress of a long preparation: lines with the rate and the time left."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 5.0
"""Seconds between lines."""


class PreparationProgress:
    """Prints a line every few seconds.

    Args:
        show: receives each line.
        name: the dataset.
        total: bytes of its files that this process reads, 0 if unknown.
        doing, unit: the work, and what it counts.
    """

    def __init__(
        self,
        show: Callable[[str], None],
        name: str,
        total: int = 0,
        *,
        doing: str = "tokenizing",
        unit: str = "tokens",
    ):
        self._show, self._name, self._total, self._unit = show, f"{doing} {name}", total, unit
        self._begin = self._shown = time.perf_counter()
        self._bytes = self._rows = self.tokens = 0

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._begin

    def count(self, rows: int, tokens: int) -> None:
        """Add rows whose bytes are unknown."""
        self._rows += rows
        self.tokens += tokens
        if self._is_due():
            self._show(f"{self._name}: {self._rows:,} rows, {self.tokens:,} {self._unit}")

    def add(self, num_bytes: int, tokens: int) -> None:
        """Add a part of the files."""
        self._bytes += num_bytes
        self.tokens += tokens
        if self._is_due():
            rate, share = self.tokens / self.seconds, self._bytes / max(1, self._total)
            left = self.seconds * (1 - share) / max(share, 1e-9)
            self._show(
                f"{self._name}: {share:.0%}, {self.tokens:,} {self._unit}, {rate:,.0f} {self._unit}/s, "
                f"{_duration(left)} left"
            )

    def _is_due(self) -> bool:
        now = time.perf_counter()
        if now - self._shown < SECONDS:
            return False
        self._shown = now
        return True


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
