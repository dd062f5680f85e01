"""Time of a full step from the seconds of its spans: the formulas that `plan` and `dryrun` share.

Both commands describe a step by the same figures (`RankTimes`). `plan` computes them from shapes (`layer_times.py`),
`dryrun` measures them on a trace. Without a pipeline, a step takes

    once + (microbatches - 1) x microbatch

With a pipeline, the schedule is simulated with the seconds of the stages' actions, and what a rank does outside of
them is added. Every seconds figure has its kind of cost: a rate of `Efficiency`, or the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from automodel_cli.pipelining.schedule.program import Action, Overlap, Program
from automodel_cli.pipelining.timeline.simulator import Costs, Timeline, simulate
from automodel_cli.planning.hardware import Gpu
from automodel_cli.planning.simulated_clock import Seconds, summed


@dataclass(frozen=True)
class Range:
    """An estimate. No single number is reported."""

    low: float
    high: float

    def times(self, factor: float) -> Range:
        return Range(self.low * factor, self.high * factor)

    def to_json(self) -> list[float]:
        return [self.low, self.high]


@dataclass(frozen=True)
class RankTimes:
    """What the time of a step follows from, of one rank. Seconds are of the critical path, by kind of cost: an
    attribute of `efficiency.Efficiency`.

    Attributes:
        num_microbatches: of the config, per step and data-parallel rank.
        tokens_per_microbatch: of documents, on average, without padding.
        data_parallel: ranks that read different rows.
        actions: kind of a schedule's action -> stage -> mean seconds. {} without a pipeline.
        pipeline: the schedule's program, as `program_from_json` reads it.
        once_seconds: a step with one microbatch, without a pipeline.
        microbatch_seconds: what one more microbatch adds to a step that has a first and a last one.
        outside_seconds: of a step, outside of the stages' forwards and backwards: reductions, clipping, the optimizer.
        hop_seconds: hidden states to the next stage.
    """

    num_microbatches: int
    tokens_per_microbatch: int
    data_parallel: int
    model_flops_per_token: float | None
    actions: dict[str, dict[str, dict[str, float]]]
    pipeline: dict[str, object] | None
    once_seconds: dict[str, float]
    microbatch_seconds: dict[str, float]
    outside_seconds: dict[str, float]
    hop_seconds: float


@dataclass(frozen=True)
class StepTime:
    """Of a whole run on `gpu`.

    Attributes:
        seconds: of the slowest rank's step, by kind of cost. In a pipeline, idle time is in proportion to the work.
        margin: of the step time, in addition to what the fit of the constants leaves unexplained.
    """

    gpu: Gpu
    num_gpus: int
    step_seconds: float
    tokens_per_second_per_gpu: float
    model_flops_per_token: float | None
    timeline: Timeline | None
    seconds: Seconds
    margin: float = 0.0

    @property
    def throughput(self) -> Range:
        """Tokens per second and GPU: what runs that the fit did not see had, relative to their estimates."""
        rate, (low, high) = self.tokens_per_second_per_gpu, self._rates
        return Range(rate * low, rate * high)

    @property
    def step_range(self) -> Range:
        low, high = self._rates
        return Range(self.step_seconds / high, self.step_seconds / low)

    @property
    def _rates(self) -> tuple[float, float]:
        return self.gpu.rates.low / (1 + self.margin), self.gpu.rates.high * (1 + self.margin)

    @property
    def mfu(self) -> Range | None:
        """Model FLOPs (recomputation does not count) over the peak."""
        per_token = self.model_flops_per_token
        return None if per_token is None else self.throughput.times(per_token / self.gpu.peak_bf16)


def step_time(ranks: Sequence[RankTimes], gpu: Gpu, num_gpus: int, margin: float = 0.0) -> StepTime:
    """Return the time of a step from one rank, or from a rank of each kind of stage."""
    first = ranks[0]
    timeline = None
    if first.pipeline is None:
        slowest = max((_whole(rank) for rank in ranks), key=total)
        step = total(slowest)
    else:
        timeline = _timeline(ranks, first.pipeline)
        # Reductions and the optimizer start when a rank's last action ends. The slowest rank determines the step.
        step = timeline.makespan + max(max(total(rank.outside_seconds), 0.0) for rank in ranks)
        work = max((_whole(rank) for rank in ranks), key=total)
        slowest = {kind: seconds * step / total(work) for kind, seconds in work.items()}
    tokens = first.num_microbatches * first.tokens_per_microbatch * first.data_parallel
    rate = tokens / num_gpus / step
    return StepTime(gpu, num_gpus, step, rate, first.model_flops_per_token, timeline, slowest, margin)


def apart(
    warm: Seconds, measured: Seconds, num_warm: int, num_measured: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return (once, microbatch) of two steps with so many microbatches.

    Example: 2 microbatches take 5 s and 4 take 8 s. One more adds 1.5 s, and a step with one microbatch takes 3.5 s.
    """
    more = summed([measured], minus=warm)
    number = max(num_measured - num_warm, 1)
    step = {kind: seconds / number for kind, seconds in more.items()} if total(more) > 0 else {}
    further = {kind: seconds * (num_measured - 1) for kind, seconds in step.items()}
    return summed([measured], minus=further), step


def total(seconds: Seconds) -> float:
    """Return the sum over all kinds of cost."""
    return sum(seconds.values())


def _whole(rank: RankTimes) -> dict[str, float]:
    """Seconds of a step with all microbatches on this rank, by kind of cost; in a pipeline without idle time."""
    count = rank.num_microbatches
    spans = [(rank.once_seconds, 1), (rank.microbatch_seconds, count - 1)]
    if rank.pipeline is not None:
        whole = ("B",) if "I" not in rank.actions else ("I", "W")
        spans = [(rank.outside_seconds, 1)]
        spans += [(span, count) for kind in ("F", *whole) for span in rank.actions.get(kind, {}).values()]
    return summed({kind: seconds * times for kind, seconds in span.items()} for span, times in spans)


def _timeline(ranks: Sequence[RankTimes], pipeline: dict[str, Any]) -> Timeline:
    """Stages that no traced rank holds cost what their weights say, in proportion to those that one does."""
    program = program_from_json(pipeline)
    weights: list[float] = pipeline["weights"]
    known: dict[str, dict[int, float]] = {"F": {}, "I": {}, "W": {}, "B": {}}
    for rank in ranks:
        for kind, by_stage in rank.actions.items():
            known[kind] |= {int(stage): total(seconds) for stage, seconds in by_stage.items()}

    def filled(kind: str) -> list[float]:
        traced = known[kind]
        if not traced:
            return [0.0] * len(weights)
        # Example: stage 0 with weight 2 was traced with 4 s. A stage with weight 3 then counts 6 s.
        unit = sum(traced.values()) / max(sum(weights[s] for s in traced), 1e-9)
        return [traced.get(s, unit * weight) for s, weight in enumerate(weights)]

    whole, inputs, parameters = filled("B"), filled("I"), filled("W")
    if any(inputs):  # a schedule that splits some backwards may run others whole
        backward = inputs, parameters
    else:
        # B is I plus W, and the schedule runs them together. How they are divided does not change the result.
        backward = [b / 2 for b in whole], [b / 2 for b in whole]
    hop = max(rank.hop_seconds for rank in ranks)
    return simulate(program, Costs(tuple(filled("F")), tuple(backward[0]), tuple(backward[1]), hop))


def program_to_json(program: Program, weights: Sequence[float]) -> dict[str, object]:
    """Orders of all ranks; pairs that run as one block are written one after the other, as torch runs them."""
    return {
        "schedule": program.schedule,
        "num_microbatches": program.num_microbatches,
        "owner": list(program.owner),
        "ranks": [[list(action) for action in program.actions(rank)] for rank in range(program.pp_size)],
        "weights": list(weights),
    }


def program_from_json(known: dict[str, Any]) -> Program:
    ranks: tuple[tuple[Action | Overlap, ...], ...] = tuple(
        tuple(Action(kind, stage, microbatch) for kind, stage, microbatch in actions) for actions in known["ranks"]
    )
    return Program(
        schedule=known["schedule"],
        num_microbatches=known["num_microbatches"],
        owner=tuple(known["owner"]),
        ranks=ranks,
    )
