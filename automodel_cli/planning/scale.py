"""A run on more GPUs, on paper: step time, exposed communication, stragglers and goodput from 64 to 4,096 GPUs.

Every data-parallel rank keeps its microbatches (weak scaling), so that the counts of a plan hold and only messages
change: those of parameters and gradients have more ranks. The network has two levels, and above `leaf` nodes a spine
with less bandwidth. Two ways to shard are compared:

    full      parameters are sharded over all data-parallel ranks, and gathered over the network
    hybrid    sharded inside a node and replicated (`mesh.dp_replicate_size`); gradients are summed over the network

Each step waits for the slowest node. `goodput.py` has failures, checkpoints and spare nodes.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from automodel_cli.distributed.mesh_config import Layout
from automodel_cli.planning.goodput import HOURS, Cluster, Goodput, best_interval, simulate
from automodel_cli.planning.hardware import Links
from automodel_cli.planning.plan import Plan
from automodel_cli.planning.report import spread
from automodel_cli.planning.reserve import usable_bytes
from automodel_cli.planning.step_time import StepTime

LARGEST = 4096
_SIMULATED = 100 * 24 * HOURS


@dataclass(frozen=True)
class Assumptions:
    """Args:
    cluster: rates of events, as of a run with one node. `step`, `save` and `nodes` are replaced.
    save: seconds of a checkpoint. None: a copy to the host at `save_rate`.
    save_rate: bytes/s of a GPU's part of a checkpoint.
    jitter: standard deviation of a node's step time, relative to the mean.
    """

    cluster: Cluster
    links: Links
    save: float | None
    save_rate: float
    jitter: float = 0.0


@dataclass(frozen=True)
class ScaleRow:
    """One number of GPUs and way to shard. `time` is without stragglers, `slowest` the factor that they add."""

    gpus: int
    sharding: str
    time: StepTime
    slowest: float
    interval: float
    goodput: Goodput
    peak: float
    fits: bool

    @property
    def exposed(self) -> float:
        """Share of the step that waits for messages."""
        seconds = self.time.seconds
        return (seconds.get("node", 0.0) + seconds.get("network", 0.0)) / self.time.step_seconds

    @property
    def kept(self) -> float:
        """Share of the undisturbed throughput that remains."""
        return self.goodput.kept / self.slowest

    def to_json(self) -> dict[str, object]:
        return {
            "gpus": self.gpus, "sharding": self.sharding, "fits": self.fits, "peak_gib": self.peak / 2**30,
            "step_seconds": self.time.step_range.times(self.slowest).to_json(), "exposed_communication": self.exposed,
            "slowest_node": self.slowest, "checkpoint_every": None if math.isinf(self.interval) else self.interval,
            "goodput": self.goodput.kept,
            "kept_tokens_per_second_per_gpu": self.time.throughput.times(self.kept).to_json(),
        }  # fmt: skip


def expected_maximum(number: int) -> float:
    """Return the expected largest of `number` standard normal values, by Blom's formula (1958), within 1%.

    Example: 1.54 of 10, 2.51 of 100. With a jitter of 2%, a step on 100 nodes takes 5% longer.
    """
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25)) if number > 1 else 0.0


def simulated_maximum(number: int, jitter: float, steps: int, seed: int = 0) -> float:
    """Return the mean factor by which the slowest of `number` nodes extends a step."""
    source = random.Random(seed)
    return sum(max(source.gauss(1.0, jitter) for _ in range(number)) for _ in range(steps)) / steps


def layouts(
    layout: Layout, gpus_per_node: int, largest: int = LARGEST, *, shards: bool = True, hybrid: bool = True
) -> Iterator[tuple[str, Layout]]:
    """Yield (way to shard, layout) of 64 GPUs, or as many as the run has, doubled up to `largest`.

    `shards`: whether the strategy shards parameters. `hybrid`: whether it has hybrid sharding.
    """
    # Hybrid sharding: parameters are sharded inside a machine, over its fast links, and replicated between machines.
    # With 8 GPUs per machine and tp = 2, 4 data-parallel ranks share one copy.
    inside = max(1, gpus_per_node // (layout.tp * layout.cp))
    model = layout.pp * layout.tp * layout.cp
    gpus = layout.world_size * max(1, math.ceil(64 / layout.world_size))
    while gpus <= largest:
        dp = gpus // model
        if layout.dp_replicate == 1:
            yield "full" if shards else "copies", replace(layout, dp_shard=dp)
        if hybrid and dp % inside == 0 and dp > inside:
            yield "hybrid", replace(layout, dp_shard=inside, dp_replicate=dp // inside)
        gpus *= 2


def scale(
    plan: Plan, assumed: Assumptions, *, memory_gib: float, largest: int = LARGEST, seed: int = 0
) -> list[ScaleRow]:
    """Return the rows of a plan. The same seed gives the same rows."""
    strategy, per_node = plan.request.parallelizer, assumed.links.gpus_per_node
    ways = {"shards": "parameters" in strategy.storage().shards, "hybrid": "hsdp" in strategy.supports}
    return [
        _row(plan, assumed, name, layout, usable_bytes(memory_gib), seed)
        for name, layout in layouts(plan.request.layout, per_node, largest, **ways)
    ]


def _row(plan: Plan, assumed: Assumptions, name: str, layout: Layout, limit: float, seed: int) -> ScaleRow:
    times = plan.times.on(layout, assumed.links)
    time = times.whole() if plan.cut is None else times.with_pipeline(plan.cut)
    before, after = plan.times.static(plan.cut), times.static(plan.cut)
    # Activations do not change with the number of data-parallel ranks, so only the static memory is exchanged.
    peak = max(memory.total + b.total - a.total for memory, a, b in zip(plan.memory, before, after, strict=True))
    nodes = math.ceil(layout.world_size / assumed.links.gpus_per_node)
    slowest = 1.0 + assumed.jitter * expected_maximum(nodes)
    size = max(times.stored(plan.cut))
    save = size / assumed.save_rate if assumed.save is None else assumed.save
    cluster = replace(assumed.cluster, nodes=nodes, step=time.step_seconds * slowest, save=save)
    best = best_interval(cluster)
    every = best if math.isfinite(best) else 1000.0
    found = simulate(cluster, every, seconds=_SIMULATED, seed=seed)
    return ScaleRow(layout.world_size, name, time, slowest, best, found, peak, peak <= limit)


def render(rows: Sequence[ScaleRow]) -> str:
    """The table, at most 80 columns wide."""
    heads = f"{'GPUs':>5} {'sharding':<8} {'GiB':>5} {'step [s]':>14} {'exposed':>7} {'save every':>10} "
    lines = [heads + f"{'goodput':>7} kept tokens/s/GPU"]
    for row in rows:
        step, kept = row.time.step_range.times(row.slowest), row.time.throughput.times(row.kept)
        minutes = row.interval * row.time.step_seconds * row.slowest / 60
        every = "-" if math.isinf(minutes) else f"{minutes:.0f} min"
        peak = f"{row.peak / 2**30:.0f}{'' if row.fits else '!'}"
        lines.append(
            f"{row.gpus:>5} {row.sharding:<8} {peak:>5} {spread(step.low, step.high):>14} {row.exposed:>7.0%} "
            f"{every:>10} {row.goodput.kept:>7.1%} {spread(kept.low, kept.high)}"
        )
    if not all(row.fits for row in rows):
        lines.append("!: does not fit")
    return "\n".join(lines)
