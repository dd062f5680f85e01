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

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from automodel_cli.data.preparation.prompts import Prompt
from automodel_cli.distributed.device_threads import threads_on_this_device
from automodel_cli.rollout.collection.queue_checkpoint import Answer, Place, pack_samples, unpacked
from automodel_cli.rollout.engines.base import Engine
from automodel_cli.rollout.engines.policy_engine import RankZeroEngine, Start
from automodel_cli.rollout.environments.episode import Episode
from automodel_cli.rollout.types import SamplingParams, WeightStream

SampleRequest = tuple[int, int, Prompt]
"""Place of the prompt, index of the sample in its group, prompt."""
Draw = Callable[[list[SampleRequest], SamplingParams, Sequence[int], Start], Callable[[], Sequence[Answer]]]
"""Begins to draw samples, with a seed for each; what is returned waits for the answers. Both halves are collective. On
ranks that only share another's prompts there may be none."""


@dataclass(frozen=True)
class Generated:
    """The answers to some requests, and the seconds that they took."""

    requests: list[SampleRequest]
    answers: Sequence[Answer]
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


def background_responses(engine: Engine) -> Draw:
    """Draws one response to each prompt."""

    def begin(
        requests: list[SampleRequest], params: SamplingParams, seeds: Sequence[int], start: Start
    ) -> Callable[[], Sequence[Answer]]:
        prompts = [prompt.tokens for _, _, prompt in requests]
        if isinstance(engine, RankZeroEngine):
            return engine.begin(prompts, params, seeds, start)
        return start(lambda: engine.generate(prompts, params, seeds))

    return begin


class SampleQueue:
    """Rollouts that are drawn beside the main thread by `draw` (null: responses), oldest first: up to `depth` of them.

    `about` says what else than the sampling decides the answers: a checkpoint's are of use only where it is the same.
    `begin`, `update`, `wait`, `take` and `state` are collective over all ranks.
    """

    def __init__(
        self,
        engine: Engine,
        device: torch.device,
        depth: int = 1,
        *,
        draw: Draw | None = None,
        about: Mapping[str, Any] | None = None,
    ):
        self._draw, self._about = draw or background_responses(engine), dict(about or {})
        self._engine, self._device, self._depth = engine, device, depth
        self._overlaps = engine.capabilities.in_flight_updates
        self._threads = threads_on_this_device(depth if self._overlaps else 1, "rollout")
        self._jobs: deque[_Job] = deque()
        self._running: list[Future[Any]] = []
        self._settings: dict[str, Any] = {}
        self._kept_settings: Mapping[str, Any] = {}
        self._kept: list[dict[Place, Answer]] = []

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
        self._settings = self._settings_of(params)
        if kept is not None:
            self._jobs.append(_Job(lambda: kept, draws=True))
            return
        seconds = [0.0]
        finish = self._draw(requests, params, seeds, lambda call: self._start(call, seconds))
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
            everywhere: list[dict[Place, Answer]] = [{} for _ in range(dist.get_world_size())]
            places = [(place, index) for place, index, _ in held.requests] if held.answers else []
            dist.all_gather_object(everywhere, dict(zip(places, map(_without_prompt, held.answers), strict=True)))
            # ranks that share prompts hold the same answers
            rollouts.append(
                pack_samples({place: answer for of_rank in everywhere for place, answer in of_rank.items()})
            )
        return {"settings": self._settings, "rollouts": rollouts} if rollouts else None

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Hold what `state` gave a checkpoint, for `kept`."""
        self._kept_settings = state["settings"] if state else {}
        self._kept = [unpacked(rollout) for rollout in state["rollouts"]] if state else []

    def kept(self, requests: list[SampleRequest], params: SamplingParams, oldest: int = 0) -> Generated | None:
        """The restored answers to exactly these samples, once. None where there are none, or where they are answers to
        other samples, by other settings (a run may be told to go on differently), or by weights before version
        `oldest`. Of a rollout all ranks get the same: either all of it or nothing."""
        for number, found in enumerate(self._kept):
            if not all((place, index) in found for place, index, _ in requests):
                continue
            del self._kept[number]
            of_them = min(answer.weight_version for answer in found.values())
            kept_settings = {"routing": False, **self._kept_settings}  # a checkpoint may be older than that
            if kept_settings != self._settings_of(params) or of_them < oldest:
                return None
            return Generated(requests, [_with_prompt(found[request[:2]], request) for request in requests], 0.0)
        return None

    def _settings_of(self, params: SamplingParams) -> dict[str, Any]:
        return dataclasses.asdict(params) | self._about

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
    """On the default stream kernels of generation and training would take turns. A stream is a thread's own setting."""
    stream = torch.cuda.Stream()
    stream.wait_stream(ready)  # the weights that were just copied
    with torch.cuda.stream(stream):
        found = draw()
    stream.synchronize()
    return found


def _without_prompt(answer: Answer) -> Answer:
    """What the run knows of an answer anyway need not travel, nor what an environment remembers of an episode."""
    if not isinstance(answer, Episode):
        return answer
    return dataclasses.replace(answer, prompt=(), messages=(), row={}, tools=None, state=None, rendered=[])


def _with_prompt(answer: Answer, request: SampleRequest) -> Answer:
    _, index, prompt = request
    return answer.about(index, prompt) if isinstance(answer, Episode) else answer
