"""Asynchronous rollouts: while a step trains, threads generate the samples of the next ones.

Threads only generate, and copy weights that the main thread has gathered. The main thread runs all collectives, before
a thread begins and after it has ended: so all ranks keep one order of collectives.

An engine whose weights may change while it generates (`Capabilities.in_flight_updates`) draws all rollouts of the queue
at once. Every other draws one after the other, and its weights change between two of them: samples and updates stand
in one line, in the order in which the main thread asked for them, so which weights draw a sample does not depend on how
long anything takes.

A checkpoint holds the samples that are asked for when it is written (`SampleQueue.state`): the weights that drew them
are gone afterwards, so a resumed run could not draw them again.
"""

from __future__ import annotations

import base64
import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from automodel_cli.data.prompts import Prompt
from automodel_cli.rollout.engine import Completion, Engine, SamplingParams, WeightStream
from automodel_cli.rollout.model_engines import RankZeroEngine

SampleRequest = tuple[int, int, Prompt]
"""Place of the prompt, index of the sample in its group, prompt."""


@dataclass(frozen=True)
class Generated:
    """The responses to some requests, and the seconds that they took."""

    requests: list[SampleRequest]
    completions: list[Completion]
    seconds: float


class _Job:
    """A rollout (`finish` gives its samples, collectively) or an update (nothing) that was begun."""

    def __init__(self, finish: Callable[[], Generated | None], *, draws: bool):
        self.draws, self._finish = draws, finish
        self._done: list[Generated | None] = []

    def result(self) -> Generated | None:
        """Waits; raises what the thread raised."""
        if not self._done:
            self._done.append(self._finish())
        return self._done[0]


class SampleQueue:
    """Rollouts that are drawn beside the main thread, oldest first: up to `depth` of them.

    `begin`, `update`, `wait`, `take` and `state` are collective over all ranks.
    """

    def __init__(self, engine: Engine, device: torch.device, depth: int = 1):
        self._engine, self._device, self._depth = engine, device, depth
        self._overlaps = engine.capabilities.in_flight_updates
        self._threads = ThreadPoolExecutor(depth if self._overlaps else 1, thread_name_prefix="rollout")
        self._jobs: deque[_Job] = deque()
        self._running: list[Future[Any]] = []
        self._settings: dict[str, Any] = {}
        self._kept_settings: Mapping[str, Any] = {}
        self._kept: list[dict[tuple[int, int], Completion]] = []

    def __len__(self) -> int:
        """Rollouts that were begun and not taken."""
        return sum(job.draws for job in self._jobs)

    def begin(
        self, requests: list[SampleRequest], params: SamplingParams, seeds: Sequence[int], oldest: int = 0
    ) -> None:
        """Start to generate. `seeds`: one for each sample; the random state is the main thread's alone. Samples that a
        checkpoint kept are not drawn again, unless weights before version `oldest` drew them."""
        assert len(self) < self._depth, "the samples before these were not taken"
        kept = self.kept(requests, params, oldest)
        self._settings = dataclasses.asdict(params)
        if kept is not None:
            self._jobs.append(_Job(lambda: kept, draws=True))
            return
        prompts, seconds = [prompt.tokens for _, _, prompt in requests], [0.0]
        if isinstance(self._engine, RankZeroEngine):
            finish = self._engine.begin(prompts, params, seeds, lambda call: self._start(call, seconds))
        else:
            finish = self._start(lambda: self._engine.generate(prompts, params, seeds), seconds)
        self._jobs.append(_Job(lambda: Generated(requests, finish(), seconds[0]), draws=True))

    def update(self, stream: WeightStream, version: int) -> None:
        """Give the engine new weights: at once where it generates on meanwhile, else after the rollouts that were begun
        before. For the latter the weights are copied (on the CPU), unless a queue of one leaves nothing else to do than
        to wait."""
        if not self._overlaps and self._depth == 1:
            self.wait()
        if self._overlaps or not self._is_busy():
            self._engine.update_weights(stream)
            self._engine.weight_version = version
            return
        mine = not isinstance(self._engine, RankZeroEngine) or self._engine.answers_here
        held = [[(name, tensor.to("cpu", copy=True)) for name, tensor in bucket] for bucket in stream if mine]

        def give() -> None:
            self._engine.update_weights(held)
            self._engine.weight_version = version

        self._jobs.append(_Job(self._start(give, [0.0]), draws=False))

    def settle(self) -> None:
        """Before the main thread itself asks the engine: until an engine that does one thing at a time is idle, with
        the newest weights."""
        if not self._overlaps:
            self.wait()

    def wait(self) -> None:
        """Until nothing is generated any more. Raises what generation raised."""
        for job in self._jobs:
            job.result()

    def take(self) -> Generated | None:
        """The oldest rollout, once it is drawn; None for an empty queue."""
        while self._jobs:
            drawn = self._jobs.popleft().result()
            if drawn is not None:
                return drawn
        return None

    def state(self) -> dict[str, Any] | None:
        """What was drawn and not yet taken, of all ranks, as JSON values; None for nothing. Waits for it."""
        rollouts = []
        for held in [job.result() for job in self._jobs]:
            if held is None:
                continue
            everywhere: list[list[tuple[int, int, Completion]]] = [[] for _ in range(dist.get_world_size())]
            mine = zip(held.requests, held.completions, strict=True)
            dist.all_gather_object(everywhere, [(place, index, answer) for (place, index, _), answer in mine])
            # ranks that share prompts hold the same answers
            found = {(place, index): answer for of_rank in everywhere for place, index, answer in of_rank}
            rollouts.append(_packed(found))
        return {"settings": self._settings, "rollouts": rollouts} if rollouts else None

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Hold what `state` gave a checkpoint, for `kept`."""
        self._kept_settings = state["settings"] if state else {}
        self._kept = [_unpacked(rollout) for rollout in state["rollouts"]] if state else []

    def kept(self, requests: list[SampleRequest], params: SamplingParams, oldest: int = 0) -> Generated | None:
        """The restored answers to exactly these samples, once. None where there are none, or where they are answers to
        other samples, by other settings (a run may be told to go on differently), or by weights before version
        `oldest`. Of a rollout all ranks get the same: either all of it or nothing."""
        for number, found in enumerate(self._kept):
            if not all((place, index) in found for place, index, _ in requests):
                continue
            del self._kept[number]
            of_them = min(completion.weight_version for completion in found.values())
            if self._kept_settings != dataclasses.asdict(params) or of_them < oldest:
                return None
            return Generated(requests, [found[place, index] for place, index, _ in requests], 0.0)
        return None

    def close(self) -> None:
        """Wait for the threads; what they have drawn is dropped. A run that fails does so once its samples are drawn:
        a thread that outlives the process's libraries would crash it."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _is_busy(self) -> bool:
        self._running = [future for future in self._running if not future.done()]
        return bool(self._running)

    def _start(self, call: Callable[[], Any], seconds: list[float]) -> Callable[[], Any]:
        """`call` in a thread; what is returned waits for it, and returns or raises what it did."""
        ready = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def timed() -> Any:
            began = time.perf_counter()
            try:
                return call() if ready is None else _on_own_stream(call, ready)
            finally:
                seconds[0] = time.perf_counter() - began

        future = self._threads.submit(timed)
        self._running.append(future)
        return future.result


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
        "versions": _text(np.array([version for answer in answers for version in answer.versions], "<i8")),
        "finish_reasons": [answer.finish_reason for answer in answers],
        "weight_versions": [answer.weight_version for answer in answers],
    }


def _unpacked(state: Mapping[str, Any]) -> dict[tuple[int, int], Completion]:
    tokens, logprobs = _numbers(state["tokens"], "<i8"), _numbers(state["logprobs"], "<f8")
    versions, ends = _numbers(state["versions"], "<i8"), np.cumsum(state["lengths"]).tolist()
    found = {}
    rows = zip(state["places"], state["lengths"], ends, state["finish_reasons"], state["weight_versions"], strict=True)
    for (place, index), length, end, reason, version in rows:
        span = slice(end - length, end)
        of_tokens = None if set(versions[span]) <= {version} else versions[span]
        found[place, index] = Completion(tokens[span], logprobs[span], reason, version, token_versions=of_tokens)
    return found


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def _numbers(text: str, dtype: str) -> list[Any]:
    return list(np.frombuffer(base64.b64decode(text), dtype).tolist())
