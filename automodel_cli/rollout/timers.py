"""Where the wall time of a step on the model's own samples goes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


class StepTimers:
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


@dataclass(frozen=True)
class Idle:
    """Seconds of a step in which the devices that train have nothing to do: until samples that are drawn on others are
    there, and while rewards judge."""

    generate: float
    reward: float

    @classmethod
    def of_rollout(cls, seconds: float, reward_seconds: float, *, draws_elsewhere: bool) -> Idle:
        """Of the `seconds` in which nothing was trained, `reward_seconds` of them for rewards. Where the devices that
        train draw the samples too, the rest is work."""
        return cls(max(0.0, seconds - reward_seconds) if draws_elsewhere else 0.0, reward_seconds)

    def of_step(self, seconds: float) -> dict[str, float]:
        """As metrics of a step that took `seconds`."""
        return {
            "idle_generate_seconds": self.generate,
            "idle_reward_seconds": self.reward,
            "idle_fraction": (self.generate + self.reward) / max(seconds, 1e-9),
        }
