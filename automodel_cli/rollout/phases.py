"""Where the wall time of a step on the model's own samples goes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Phases:
    """Seconds of this rank by phase. On a GPU they are the host's: what it queues counts to the phase that waits."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - began

    def begin(self, name: str) -> None:
        """`end` says how long it was."""
        self._seconds[name] = -time.perf_counter()

    def end(self, name: str) -> None:
        """Of what `begin` began."""
        self._seconds[name] += time.perf_counter()

    def taken(self) -> Mapping[str, float]:
        """`NAME_seconds` since the last call."""
        found, self._seconds = self._seconds, {}
        return {f"{name}_seconds": seconds for name, seconds in found.items()}
