"""Estimate the time of a full step: simulate the schedule with the measured stage durations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from automodel_cli.dryrun.hardware import Gpu
from automodel_cli.dryrun.simulated_clock import Seconds, summed
from automodel_cli.dryrun.types import GIB, RankResult
from automodel_cli.pipelining.schedule.program import Action, Overlap, Program
from automodel_cli.pipelining.timeline.simulator import Costs, Timeline, simulate
from automodel_cli.planning.reserve import usable_bytes


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
class Estimate:
    """Of a whole run on `gpu`, from its traced ranks."""

    ranks: tuple[RankResult, ...]
    gpu: Gpu
    num_gpus: int
    step_seconds: float
    tokens_per_second_per_gpu: float
    timeline: Timeline | None
    seconds: Seconds
    """Of the slowest rank's step, by kind of cost. In a pipeline, idle time is in proportion to the work."""

    @property
    def throughput(self) -> Range:
        """Tokens per second and GPU: what runs that the fit did not see had, relative to their estimates."""
        rate, rates = self.tokens_per_second_per_gpu, self.gpu.rates
        return Range(rate * rates.low, rate * rates.high)

    @property
    def step_range(self) -> Range:
        return Range(self.step_seconds / self.gpu.rates.high, self.step_seconds / self.gpu.rates.low)

    @property
    def reserved(self) -> Range:
        """Bytes that the allocator reserves on the heaviest rank. It frees unused blocks where the GPU has no more."""
        peak, rates, most = self.heaviest.peak, self.gpu.rates, max(self.gpu.memory_gib * GIB, self.heaviest.peak)
        return Range(min(peak * rates.reserved_low, most), min(peak * rates.reserved_high, most))

    @property
    def heaviest(self) -> RankResult:
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def fits(self) -> bool:
        return self.heaviest.peak <= usable_bytes(self.gpu.memory_gib)

    @property
    def mfu(self) -> Range | None:
        """Model FLOPs (recomputation does not count) over the peak."""
        per_token = self.heaviest.model_flops_per_token
        return None if per_token is None else self.throughput.times(per_token / self.gpu.peak_bf16)

    def counted(self) -> dict[str, Any]:
        """What `scripts/calibrate.py` fits constants to: seconds at rates of 1, without what was fitted."""
        rates = self.gpu.rates
        factors = {kind: getattr(rates, kind) for kind in self.seconds}
        factors |= {"host": 1.0, "interference": 1 / rates.interference}
        return {
            "seconds": {kind: seconds * factors[kind] for kind, seconds in self.seconds.items()},
            "tokens": self.tokens_per_second_per_gpu * self.step_seconds,
            "peak_gib": self.heaviest.peak / GIB,
        }

    @property
    def utilisation_bound(self) -> float:
        """What kernels alone would allow: all FLOPs of a step at the peak, over the time of all its kernels, one after
        the other."""
        flops = sum(rank.step_flops for rank in self.ranks)
        seconds = sum(rank.step_kernel_seconds for rank in self.ranks)
        return flops / self.gpu.peak_bf16 / seconds if seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """Memory and collectives of the heaviest rank; of the counts the largest of all traced ranks."""
        heaviest = self.heaviest
        return {
            "peak_gib": heaviest.peak / GIB,
            "peak_by_kind": {kind: size / GIB for kind, size in heaviest.peak_by_kind.items()},
            "plan_gib": heaviest.plan / GIB,
            "host_syncs_per_microbatch": max(rank.num_syncs / rank.measured_microbatches for rank in self.ranks),
            "kernels_per_microbatch": max(rank.num_kernels / rank.measured_microbatches for rank in self.ranks),
            "collectives": heaviest.collectives,
            "reserved_gib": self.reserved.times(1 / GIB).to_json(),
            "step_seconds": self.step_range.to_json(),
            "tokens_per_second_per_gpu": self.throughput.to_json(),
            "mfu_estimate": None if self.mfu is None else self.mfu.to_json(),
            "seconds_by_kind": dict(self.seconds),
            "counted": self.counted(),
            "utilisation_bound": self.utilisation_bound,
            "fits": self.fits,
        }


def estimate(ranks: Sequence[RankResult], gpu: Gpu, num_gpus: int) -> Estimate:
    """Without a pipeline: one microbatch with everything that is done once, and the others at what one more takes.
    With one: the simulator, and what a rank does outside of its stages' work."""
    first = ranks[0]
    count = first.num_microbatches
    timeline = None
    if first.pipeline is None:
        slowest = max((_whole(rank) for rank in ranks), key=_total)
        step = _total(slowest)
    else:
        timeline = _timeline(ranks, first.pipeline)
        step = timeline.makespan + max(max(_total(rank.outside_seconds), 0.0) for rank in ranks)
        work = max((_whole(rank) for rank in ranks), key=_total)
        slowest = {kind: seconds * step / _total(work) for kind, seconds in work.items()}
    tokens = count * first.tokens_per_microbatch * first.data_parallel
    return Estimate(tuple(ranks), gpu, num_gpus, step, tokens / num_gpus / step, timeline, slowest)


def _total(seconds: Seconds) -> float:
    return sum(seconds.values())


def _whole(rank: RankResult) -> dict[str, float]:
    """Seconds of a step with all microbatches on this rank, by kind of cost; in a pipeline without idle time."""
    count = rank.num_microbatches
    spans = [(rank.once_seconds, 1), (rank.microbatch_seconds, count - 1)]
    if rank.pipeline is not None:
        whole = ("B",) if "I" not in rank.actions else ("I", "W")
        spans = [(rank.outside_seconds, 1)]
        spans += [(span, count) for kind in ("F", *whole) for span in rank.actions.get(kind, {}).values()]
    return summed({kind: seconds * times for kind, seconds in span.items()} for span, times in spans)


def _timeline(ranks: Sequence[RankResult], pipeline: dict[str, Any]) -> Timeline:
    """Stages that no traced rank holds cost what their weights say, in proportion to those that one does."""
    program = program_from_json(pipeline)
    weights: list[float] = pipeline["weights"]
    known: dict[str, dict[int, float]] = {"F": {}, "I": {}, "W": {}, "B": {}}
    for rank in ranks:
        for kind, by_stage in rank.actions.items():
            known[kind] |= {int(stage): _total(seconds) for stage, seconds in by_stage.items()}

    def filled(kind: str) -> list[float]:
        traced = known[kind]
        if not traced:
            return [0.0] * len(weights)
        unit = sum(traced.values()) / max(sum(weights[s] for s in traced), 1e-9)
        return [traced.get(s, unit * weight) for s, weight in enumerate(weights)]

    whole, inputs, parameters = filled("B"), filled("I"), filled("W")
    if any(inputs):  # a schedule that splits some backwards may run others whole
        backward = inputs, parameters
    else:
        backward = [b / 2 for b in whole], [b / 2 for b in whole]
    hop = max(rank.hop_seconds for rank in ranks)
    return simulate(program, Costs(tuple(filled("F")), tuple(backward[0]), tuple(backward[1]), hop))


def program_to_json(program: Program, weights: Sequence[float]) -> dict[str, Any]:
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
