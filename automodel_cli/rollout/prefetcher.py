"""Asynchronous rollouts: while a step trains, a thread generates the samples of the next one.

The thread only generates. The main thread runs all collectives, before the thread begins and after it has ended: so all
ranks keep one order of collectives.

A checkpoint holds the samples that are drawn when it is written (`RolloutPrefetcher.state`): the weights that drew them
are gone afterwards, so a resumed run could not draw them again.
"""

from __future__ import annotations

import base64
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from automodel_cli.data.prompts import Prompt
from automodel_cli.rollout.engine import Completion, Engine, SamplingParams
from automodel_cli.rollout.model_engines import RankZeroEngine

SampleRequest = tuple[int, int, Prompt]
"""Place of the prompt, index of the sample in its group, prompt."""


@dataclass(frozen=True)
class Generated:
    """The responses to some requests, and the seconds that they took."""

    requests: list[SampleRequest]
    completions: list[Completion]
    seconds: float


class RolloutPrefetcher:
    """At most one call of an engine that runs beside the main thread.

    `begin`, then (with nothing else asked of the engine, and its weights left alone) `wait`, then `take`. All three are
    collective over all ranks.
    """

    def __init__(self, engine: Engine, device: torch.device):
        self._engine, self._device = engine, device
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="rollout")
        self._finish: Callable[[], list[Completion]] | None = None
        self._requests: list[SampleRequest] = []
        self._seconds = 0.0
        self._generated: Generated | None = None
        self._settings: dict[str, Any] = {}
        self._kept: Mapping[str, Any] | None = None

    def begin(self, requests: list[SampleRequest], params: SamplingParams, seeds: Sequence[int]) -> None:
        """Start to generate. `seeds`: one for each sample; the random state is the main thread's alone."""
        assert self._finish is None and self._generated is None, "the samples before these were not taken"
        prompts = [prompt.tokens for _, _, prompt in requests]
        self._requests, self._settings, self._kept = requests, dataclasses.asdict(params), None
        if isinstance(self._engine, RankZeroEngine):
            self._finish = self._engine.begin(prompts, params, seeds, self._start)
        else:
            self._finish = self._start(lambda: self._engine.generate(prompts, params, seeds))

    def wait(self) -> None:
        """Until nothing is generated any more. Raises what generation raised. Does nothing if nothing was begun."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            completions = finish()
            self._generated = Generated(self._requests, completions, self._seconds)

    def take(self) -> Generated | None:
        """What was drawn since the last call, None for nothing."""
        self.wait()
        drawn, self._generated = self._generated, None
        return drawn

    def state(self) -> dict[str, Any] | None:
        """What was drawn and not yet taken, of all ranks, as JSON values; None for nothing. Collective."""
        self.wait()
        held = self._generated
        mine = [] if held is None else [*zip(held.requests, held.completions, strict=True)]
        everywhere: list[list[tuple[int, int, Completion]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, [(place, index, answer) for (place, index, _), answer in mine])
        # ranks that share prompts hold the same answers
        found = {(place, index): answer for of_rank in everywhere for place, index, answer in of_rank}
        return {"settings": self._settings, **_packed(found)} if found else None

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Hold what `state` gave a checkpoint, for `kept`."""
        self._kept = state

    def kept(self, requests: list[SampleRequest], params: SamplingParams) -> Generated | None:
        """The restored answers to exactly these samples, once. None where there are none, or where they are answers to
        other samples or by other settings: a run may be told to go on differently."""
        state, self._kept = self._kept, None
        if state is None or state["settings"] != dataclasses.asdict(params):
            return None
        found = _unpacked(state)
        if not all((place, index) in found for place, index, _ in requests):
            return None
        return Generated(requests, [found[place, index] for place, index, _ in requests], 0.0)

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


def _packed(found: Mapping[tuple[int, int], Completion]) -> dict[str, Any]:
    """Completions as JSON values: what is as long as a completion as the bytes of one array, exact and compact."""
    answers = list(found.values())
    return {
        "places": [[*key] for key in found],
        "lengths": [len(answer.tokens) for answer in answers],
        "tokens": _text(np.array([token for answer in answers for token in answer.tokens], "<i8")),
        "logprobs": _text(np.array([logprob for answer in answers for logprob in answer.logprobs], "<f8")),
        "finish_reasons": [answer.finish_reason for answer in answers],
        "weight_versions": [answer.weight_version for answer in answers],
    }


def _unpacked(state: Mapping[str, Any]) -> dict[tuple[int, int], Completion]:
    tokens, logprobs = _numbers(state["tokens"], "<i8"), _numbers(state["logprobs"], "<f8")
    ends = np.cumsum(state["lengths"]).tolist()
    found = {}
    rows = zip(state["places"], state["lengths"], ends, state["finish_reasons"], state["weight_versions"], strict=True)
    for (place, index), length, end, reason, version in rows:
        span = slice(end - length, end)
        found[place, index] = Completion(tokens[span], logprobs[span], reason, version)
    return found


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def _numbers(text: str, dtype: str) -> list[Any]:
    return list(np.frombuffer(base64.b64decode(text), dtype).tolist())
