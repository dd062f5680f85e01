"""Asynchronous rollouts: threads generate the samples of later steps while the current step trains.

- Threads generate, and copy weights that the main thread has gathered. The main thread runs all collectives, before a
  thread starts and after it has ended. Therefore all ranks run collectives in the same order.
- If weights may change during generation (`Capabilities.in_flight_updates`), all rollouts of the queue are generated
  concurrently.
- Otherwise rollouts run one after another, and weights change between two rollouts. Rollouts and updates form one
  queue in the order of the calls. Which weights sample a token does not depend on timing.

Example with `max_off_policy_steps=1` and an engine without in-flight updates::

    main thread:   train step 1 | update(1) | train step 2 | update(2)
    worker thread: rollout 2    |           | rollout 3    |

A checkpoint contains the pending samples (`SampleQueue.state`). A resumed run could not generate them again, because
the weights that sampled them are gone.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from automodel_cli.data.preparation.prompt_dataset import Prompt
from automodel_cli.distributed.device_threads import threads_on_this_device
from automodel_cli.rollout.collection.queue_checkpoint import (
    Answer,
    PackedSamples,
    Place,
    QueueState,
    pack_samples,
    unpacked,
)
from automodel_cli.rollout.engines.base import Engine
from automodel_cli.rollout.engines.policy_engine import RankZeroEngine, Start
from automodel_cli.rollout.types import SamplingParams, WeightStream

SampleRequest = tuple[int, int, Prompt]
"""Place of the prompt, index of the sample in its group, prompt."""
Draw = Callable[[list[SampleRequest], SamplingParams, Sequence[int], Start], Callable[[], Sequence[Answer]]]
"""Start to generate samples, one seed each. The returned function waits for the answers. Both calls are collective. On
ranks that only share the prompts of another rank, the answers may be empty."""


T = TypeVar("T")


@dataclass(frozen=True)
class Generated:
    """Answers to requests, and the seconds that generation took."""

    requests: list[SampleRequest]
    answers: Sequence[Answer]
    seconds: float


class _Job:
    """A queued rollout (`finish` returns its samples, collectively) or a weight update (`finish` returns None)."""

    def __init__(self, finish: Callable[[], Generated | None], *, draws: bool):
        self.draws, self._finish = draws, finish
        self._done: list[Generated | None] = []

    def result(self) -> Generated | None:
        """Wait for the job. Raise the exception of its thread."""
        if not self._done:
            self._done.append(self._finish())
        return self._done[0]


def background_responses(engine: Engine) -> Draw:
    """Generates one response per prompt."""

    def begin(
        requests: list[SampleRequest], params: SamplingParams, seeds: Sequence[int], start: Start
    ) -> Callable[[], Sequence[Answer]]:
        prompts = [prompt.tokens for _, _, prompt in requests]
        if isinstance(engine, RankZeroEngine):
            return engine.begin(prompts, params, seeds, start)
        return start(lambda: engine.generate(prompts, params, seeds))

    return begin


# Example with depth 2: while step s trains, the samples of s + 1 and s + 2 are generated. The samples of s + 2 start
# with the weights of step s - 1, so they are two updates old when they are trained on. In-flight updates reduce that.
class SampleQueue:
    """Queue of up to `depth` rollouts that `draw` generates concurrently with the main thread, oldest first.

    `draw=None` generates single responses. `about` is a fingerprint of other settings that determine answers: restored
    samples are used only if it is unchanged. `begin`, `update`, `wait`, `take` and `state` are collective over all
    ranks.
    """

    def __init__(
        self,
        engine: Engine,
        device: torch.device,
        depth: int = 1,
        *,
        draw: Draw | None = None,
        about: Mapping[str, object] | None = None,
    ):
        self._draw, self._about = draw or background_responses(engine), dict(about or {})
        self._engine, self._device, self._depth = engine, device, depth
        self._overlaps = engine.capabilities.in_flight_updates
        self._threads = threads_on_this_device(depth if self._overlaps else 1, "rollout")
        self._jobs: deque[_Job] = deque()
        self._running: list[Future[Any]] = []
        self._settings: dict[str, object] = {}
        self._kept_settings: Mapping[str, object] = {}
        self._kept: list[dict[Place, Answer]] = []

    def __len__(self) -> int:
        """Return the number of rollouts that were started and not taken."""
        return sum(job.draws for job in self._jobs)

    def begin(
        self, requests: list[SampleRequest], params: SamplingParams, seeds: Sequence[int], oldest: int = 0
    ) -> None:
        """Start to generate a rollout. `seeds` has one seed per sample, because only the main thread may use the
        global random state. Restored samples are reused, unless weights before version `oldest` sampled them."""
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
        """Give the engine new weights: immediately if it supports in-flight updates, else after the rollouts that were
        started earlier. In the second case the weights are copied to the CPU, unless a queue of depth 1 has to wait
        anyway."""
        # With depth 1 no later rollout is queued, so waiting is cheaper than a copy of the weights.
        if not self._overlaps and self._depth == 1:
            self.wait()
        if self._overlaps or not self._is_busy():
            self._engine.update_weights(stream)
            self._engine.weight_version = version
            return
        is_local = not isinstance(self._engine, RankZeroEngine) or self._engine.answers_here
        # The next training step changes the weights before the queued update runs. Every rank consumes the stream,
        # because it is collective. Only ranks with an engine keep the copy.
        held = [[(name, tensor.to("cpu", copy=True)) for name, tensor in bucket] for bucket in stream if is_local]

        def give() -> None:
            self._engine.update_weights(held)
            self._engine.weight_version = version

        self._jobs.append(_Job(self._start(give, [0.0]), draws=False))

    def settle(self) -> None:
        """Wait until an engine without concurrent calls is idle and has the newest weights. Call it before the main
        thread uses the engine."""
        if not self._overlaps:
            self.wait()

    def wait(self) -> None:
        """Wait until no generation is running. Raise the exception of a thread."""
        for job in self._jobs:
            job.result()

    def take(self) -> Generated | None:
        """Return the oldest rollout once it is complete, or None if the queue is empty."""
        while self._jobs:
            rollout = self._jobs.popleft().result()
            if rollout is not None:
                return rollout
        return None

    def state(self) -> QueueState | None:
        """Return the pending samples of all ranks as JSON values, or None. Waits for generation."""
        rollouts: list[PackedSamples] = []
        for held in [job.result() for job in self._jobs]:
            if held is None:
                continue
            # Places are global, so a resumed run may distribute prompts to another number of ranks.
            everywhere: list[dict[Place, Answer]] = [{} for _ in range(dist.get_world_size())]
            places = [(place, index) for place, index, _ in held.requests] if held.answers else []
            dist.all_gather_object(
                everywhere, dict(zip(places, (answer.without_prompt() for answer in held.answers), strict=True))
            )
            # ranks that share prompts have the same answers
            rollouts.append(
                pack_samples({place: answer for of_rank in everywhere for place, answer in of_rank.items()})
            )
        return {"settings": self._settings, "rollouts": rollouts} if rollouts else None

    def restore(self, state: QueueState | None) -> None:
        """Store the value of `state` from a checkpoint, for `kept`."""
        self._kept_settings = state["settings"] if state else {}
        self._kept = [unpacked(rollout) for rollout in state["rollouts"]] if state else []

    def kept(self, requests: list[SampleRequest], params: SamplingParams, oldest: int = 0) -> Generated | None:
        """Return the restored answers to exactly these samples, once. Return None if there are none, if the requests
        or settings differ, or if weights before version `oldest` sampled them. All ranks get the same result: the
        complete rollout or None."""
        for number, rollout in enumerate(self._kept):
            if not all((place, index) in rollout for place, index, _ in requests):
                continue
            del self._kept[number]
            # The oldest weights that sampled any token of the rollout.
            of_them = min(answer.weight_version for answer in rollout.values())
            kept_settings = {"routing": False, **self._kept_settings}  # a checkpoint may be older than that
            if kept_settings != self._settings_of(params) or of_them < oldest:
                return None
            return Generated(
                requests, [rollout[place, index].about(index, prompt) for place, index, prompt in requests], 0.0
            )
        return None

    def _settings_of(self, params: SamplingParams) -> dict[str, object]:
        return dataclasses.asdict(params) | self._about

    def close(self) -> None:
        """Wait for the threads and discard their samples. A failed run waits too, because a thread that outlives the
        libraries of the process would crash it."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _is_busy(self) -> bool:
        self._running = [future for future in self._running if not future.done()]
        return bool(self._running)

    def _start(self, call: Callable[[], T], seconds: list[float]) -> Callable[[], T]:
        """Run `call` in a thread. The returned function waits for it and returns its result or raises its exception."""
        # Work that the main thread queued so far, for example the copy of new weights.
        ready = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def timed() -> T:
            began = time.perf_counter()
            try:
                return call() if ready is None else _on_own_stream(call, ready)
            finally:
                seconds[0] = time.perf_counter() - began

        # One thread: jobs run in order, so weights are updated between the rollouts before and after `update`.
        future = self._threads.submit(timed)
        self._running.append(future)
        return future.result


def _on_own_stream(draw: Callable[[], T], ready: torch.cuda.Stream) -> T:
    """On the default stream, kernels of generation and training would be serialized. The current stream is a setting
    of the thread."""
    stream = torch.cuda.Stream()
    stream.wait_stream(ready)  # the weights that were just copied
    with torch.cuda.stream(stream):
        result = draw()
    stream.synchronize()
    return result
