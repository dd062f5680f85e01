"""vLLM servers on the GPUs that train: either they hold memory there or training does.

They sleep while a step trains, and are woken in the order that vLLM's documentation gives: memory of the weights, the
new weights, then the cache (`/sleep`, `/wake_up?tags=...`; `VLLM_SERVER_DEV_MODE=1` and `--enable-sleep-mode`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from automodel_cli.rollout.engine import Completion, Engine, SamplingParams, WeightStream
from automodel_cli.rollout.transfer import once
from automodel_cli.rollout.vllm import VLLMEngine

_AWAKE = frozenset({"weights", "kv_cache"})


class SharedGPUs:
    """`engine` over `servers`, all of which it wakes and puts to sleep together. One process speaks to them.

    A server that does not answer to that ends the run: nobody would know whether it holds memory that training needs.
    """

    def __init__(self, engine: Engine, servers: Sequence[VLLMEngine]):
        self._engine, self._servers = engine, servers
        self.capabilities, self.weight_version = engine.capabilities, 0
        self._awake, self._has_weights = _AWAKE, True
        self._waking = threading.Lock()

    @property
    def metrics(self) -> dict[str, float]:
        return dict(getattr(self._engine, "metrics", {}))

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """See `Engine.generate`. Wakes what sleeps; several threads may call it at once."""
        with self._waking:
            self._wake("weights")
            assert self._has_weights, "a server that has slept without its weights must be given new ones first"
            self._wake("kv_cache")
        return self._engine.generate(prompts, params, seeds)

    def update_weights(self, stream: WeightStream) -> None:
        """See `Engine.update_weights`. The cache is woken later: the bucket at hand needs room too."""
        self._wake("weights")
        self._engine.update_weights(stream)
        self._has_weights = True
        self.weight_version += 1

    def rest(self, *, weights_follow: bool) -> None:
        """Give the GPUs to training. With `weights_follow` new ones come before the next generation, so those at hand
        are dropped (level 2); otherwise they are kept in the machine's memory (level 1)."""
        self._each(f"/sleep?level={2 if weights_follow else 1}")
        self._awake, self._has_weights = frozenset(), not weights_follow

    def _wake(self, what: Literal["weights", "kv_cache"]) -> None:
        if what not in self._awake:
            self._each(f"/wake_up?tags={what}")
            self._awake |= {what}

    def _each(self, path: str) -> None:
        with ThreadPoolExecutor(len(self._servers)) as threads:
            list(threads.map(lambda engine: once(engine.server, path, {}), self._servers))
