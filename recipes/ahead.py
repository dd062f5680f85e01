"""Asynchronous rollouts: while a step trains, a thread generates the samples of the next one.

The thread only generates. Everything that ranks do together (who asks what, who hears which answer) happens in the main
thread, before it begins and after it has ended, so collectives of all ranks keep one order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from automodel_cli.data.prompts import Prompt
from automodel_cli.rollout.engine import Completion, Engine, SamplingParams
from recipes.engines import FirstRankEngine

Asked = tuple[int, int, Prompt]
"""Place of the prompt, index of the sample in its group, prompt."""


@dataclass(frozen=True)
class Drawn:
    """The answers to what was asked, and how long they took."""

    asked: list[Asked]
    completions: list[Completion]
    seconds: float


class Ahead:
    """At most one call of an engine that runs beside the main thread.

    `begin`, then (with nothing else asked of the engine, and its weights left alone) `wait`, then `take`. All three are
    collective over all ranks.
    """

    def __init__(self, engine: Engine, device: torch.device):
        self._engine, self._device = engine, device
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._finish: Callable[[], list[Completion]] | None = None
        self._asked: list[Asked] = []
        self._seconds = 0.0
        self._drawn: Drawn | None = None

    def begin(self, asked: list[Asked], params: SamplingParams, seeds: Sequence[int]) -> None:
        """Start to generate. `seeds`: one for each sample; the random state is the main thread's alone."""
        assert self._finish is None and self._drawn is None, "the samples before these were not taken"
        prompts = [prompt.tokens for _, _, prompt in asked]
        self._asked = asked
        if isinstance(self._engine, FirstRankEngine):
            self._finish = self._engine.begin(prompts, params, seeds, self._start)
        else:
            self._finish = self._start(lambda: self._engine.generate(prompts, params, seeds))

    def wait(self) -> None:
        """Until nothing is generated any more. Raises what generation raised. Does nothing if nothing was begun."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            completions = finish()
            self._drawn = Drawn(self._asked, completions, self._seconds)

    def take(self) -> Drawn | None:
        """What was drawn since the last call, None for nothing."""
        self.wait()
        drawn, self._drawn = self._drawn, None
        return drawn

    def close(self) -> None:
        """Wait for the thread; what it has drawn is dropped. A run that fails does so once its samples are drawn:
        a thread that outlives the process's libraries would crash it."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _start(self, draw: Callable[[], Any]) -> Callable[[], Any]:
        """`draw` in the thread; what is returned waits for it, and returns or raises what it did."""
        ready = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def timed() -> Any:
            began = time.perf_counter()
            try:
                return draw() if ready is None else _on_own_stream(draw, ready)
            finally:
                self._seconds = time.perf_counter() - began

        return self._threads.submit(timed).result


def _on_own_stream(draw: Callable[[], Any], ready: torch.cuda.Stream) -> Any:
    """On the default stream kernels of generation and training would take turns. Device and stream are a thread's own
    settings."""
    torch.cuda.set_device(ready.device)
    stream = torch.cuda.Stream()
    stream.wait_stream(ready)  # the weights that were just copied
    with torch.cuda.stream(stream):
        found = draw()
    stream.synchronize()
    return found
