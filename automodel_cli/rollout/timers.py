"""Wall time of the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


class StepTimers:
    """Seconds of this rank by phase, measured on the host. Queued GPU work counts to the phase that waits for it."""

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
        """Start a phase, which `end` ends."""
        self._seconds[name] = -time.perf_counter()

    def end(self, name: str) -> None:
        """End the phase that `begin` started."""
        self._seconds[name] += time.perf_counter()

    def taken(self) -> Mapping[str, float]:
        """`NAME_seconds` since the last call."""
        times, self._seconds = self._seconds, {}
        return {f"{name}_seconds": seconds for name, seconds in times.items()}


@dataclass(frozen=True)
class Idle:
    """Seconds of a step in which the training devices are idle: waiting for samples of other devices, and
    for rewards."""

    generate: float
    reward: float

    @classmethod
    def of_rollout(cls, seconds: float, reward_seconds: float, *, draws_elsewhere: bool) -> Idle:
        """Split the `seconds` without training. `reward_seconds` are idle. The rest is idle only if other devices
        generate."""
        return cls(max(0.0, seconds - reward_seconds) if draws_elsewhere else 0.0, reward_seconds)

    def of_step(self, seconds: float) -> dict[str, float]:
        """As metrics of a step that took `seconds`."""
        return {
            "idle_generate_seconds": self.generate,
            "idle_reward_seconds": self.reward,
            "trainer_idle_fraction": (self.generate + self.reward) / max(seconds, 1e-9),
        }
