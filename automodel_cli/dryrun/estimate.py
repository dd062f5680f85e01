"""Estimate the time of a full step: simulate the schedule with the measured stage durations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from automodel_cli.dryrun.hardware import Gpu
from automodel_cli.dryrun.types import GIB, RankResult
from automodel_cli.pipelining.schedule.program import Action, Overlap, Program
from automodel_cli.pipelining.timeline.simulator import Costs, Timeline, simulate
from automodel_cli.planning.reserve import usable_bytes


@dataclass(frozen=True)
class Estimate:
    """Of a whole run on `gpu`, from its traced ranks."""

    ranks: tuple[RankResult, ...]
    gpu: Gpu
    num_gpus: int
    step_seconds: float
    tokens_per_second_per_gpu: float
    timeline: Timeline | None

    @property
    def heaviest(self) -> RankResult:
        return max(self.ranks, key=lambda rank: rank.peak)

    @property
    def fits(self) -> bool:
        return self.heaviest.peak <= usable_bytes(self.gpu.memory_gib)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs (recomputation does not count) over the peak."""
        per_token = self.heaviest.model_flops_per_token
        return None if per_token is None else per_token * self.tokens_per_second_per_gpu / self.gpu.peak_bf16

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
            "step_seconds": self.step_seconds,
            "tokens_per_second_per_gpu": self.tokens_per_second_per_gpu,
            "mfu_estimate": self.mfu,
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
        step = max(rank.once_seconds + rank.microbatch_seconds * (count - 1) for rank in ranks)
    else:
        timeline = _timeline(ranks, first.pipeline)
        step = timeline.makespan + max(rank.outside_seconds for rank in ranks)
    tokens = count * first.tokens_per_microbatch * first.data_parallel
    return Estimate(tuple(ranks), gpu, num_gpus, step, tokens / num_gpus / step, timeline)


def _timeline(ranks: Sequence[RankResult], pipeline: dict[str, Any]) -> Timeline:
    """Stages that no traced rank holds cost what their weights say, in proportion to those that one does."""
    program = program_from_json(pipeline)
    weights: list[float] = pipeline["weights"]
    known: dict[str, dict[int, float]] = {"F": {}, "I": {}, "W": {}, "B": {}}
    for rank in ranks:
        for kind, by_stage in rank.actions.items():
            known[kind] |= {int(stage): seconds for stage, seconds in by_stage.items()}

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
