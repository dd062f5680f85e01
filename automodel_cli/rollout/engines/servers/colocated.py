"""Servers on the GPUs that train: they sleep while a step trains.

Order of waking, as documented by vLLM and SGLang: memory of the weights, new weights, then the KV cache.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from automodel_cli.rollout.engines.base import Engine
from automodel_cli.rollout.engines.live_update import WeightUpdateMixin
from automodel_cli.rollout.types import Completion, SamplingParams, WeightStream

_AWAKE = frozenset({"weights", "kv_cache"})


class SharedGPUs:
    """Wrap `engine` and wake or suspend all `servers` together. Only rank 0 talks to them. A server that does not
    respond ends the run, because it might still hold memory that training needs."""

    def __init__(self, engine: Engine, servers: Sequence[WeightUpdateMixin]):
        self._engine, self._servers = engine, servers
        self.capabilities, self.weight_version = engine.capabilities, 0
        self._awake, self._has_weights = _AWAKE, True
        self._waking = threading.Lock()

    @property
    def metrics(self) -> dict[str, float]:
        return dict(getattr(self._engine, "metrics", {}))

    def idle_fraction(self) -> float:
        """See `OpenRequests`. The mean over the servers."""
        return statistics.fmean(server.idle_fraction() for server in self._servers)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """See `Engine.generate`. Wakes sleeping servers. Several threads may call it concurrently."""
        with self._waking:
            self._wake("weights")
            assert self._has_weights, "a server that has slept without its weights must be given new ones first"
            self._wake("kv_cache")
        return self._engine.generate(prompts, params, seeds)

    def update_weights(self, stream: WeightStream) -> None:
        """See `Engine.update_weights`. The KV cache is woken later, because the current bucket needs memory too."""
        self._wake("weights")
        self._engine.update_weights(stream)
        self._has_weights = True
        self.weight_version += 1

    def rest(self, *, weights_follow: bool) -> None:
        """Hand the GPUs to training. With `weights_follow` the weights may be dropped, because new ones arrive before
        the next generation."""
        self._each(lambda server: server.sleep(weights_follow=weights_follow))
        self._awake, self._has_weights = frozenset(), not weights_follow

    def _wake(self, what: Literal["weights", "kv_cache"]) -> None:
        if what not in self._awake:
            self._each(lambda server: server.wake(what))
            self._awake |= {what}

    def _each(self, ask: Callable[[WeightUpdateMixin], None]) -> None:
        with ThreadPoolExecutor(len(self._servers)) as threads:
            list(threads.map(ask, self._servers))
