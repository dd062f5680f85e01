"""`automodel plan --goodput`: what failures, checkpoints and slow nodes leave of the estimated throughput."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.mesh_config import Layout
from automodel_cli.dryrun.command import distinct_ranks, trace_config
from automodel_cli.dryrun.estimate import Estimate
from automodel_cli.dryrun.types import GIB, TraceRequest
from automodel_cli.planning.goodput import HOURS, Cluster, Goodput, best_interval, table
from automodel_cli.planning.report import spread
from automodel_cli.run.recipe import Recipe

_SIMULATED = 400 * 24 * HOURS
_KEPT = ("parameters", "optimizer")
"""Kinds of memory that a checkpoint has."""


@dataclass(frozen=True)
class Assumptions:
    """Rates of events. Hours, minutes and seconds as named; 0 hours: never."""

    gpu_mtbf_hours: float
    restart_minutes: float
    save_seconds: float | None
    """None: a copy to the host with `checkpoint.async_save`, else 1 GB/s of storage per GPU."""
    spare_nodes: int
    repair_hours: float
    slow_node_hours: float
    slow_for_hours: float
    slow_factor: float


def print_goodput(recipe: Recipe, request: TraceRequest, layout: Layout, assumed: Assumptions) -> int:
    """Dry-run the step, simulate a year of events, print. Raises as a dry run does."""
    found = trace_config(request, distinct_ranks(layout))
    cluster = _cluster(found, recipe, request, assumed)
    every: int | None = recipe.checkpoint.every
    best, lines = best_interval(cluster), table(cluster, every, seconds=_SIMULATED)
    minutes = best * cluster.step / 60
    step, rate = found.step_range, found.throughput
    print(
        f"{request.num_gpus} GPUs on {cluster.nodes} nodes: step {spread(step.low, step.high)} s, "
        f"{spread(rate.low, rate.high)} tokens/s/GPU without failures\n"
        f"a failure every {cluster.mtbf / HOURS:.3g} hours; a checkpoint stops training for {cluster.save:.3g} s, "
        f"a restart takes {cluster.restart / 60:g} minutes\n"
        f"best interval by formula (Daly): {best:.0f} steps, {minutes:.0f} minutes\n"
    )
    print(_rendered(lines, found))
    for line in _hierarchical(found, request, cluster):
        print(line)
    return 0


def _cluster(found: Estimate, recipe: Recipe, request: TraceRequest, assumed: Assumptions) -> Cluster:
    nodes = max(1, math.ceil(request.num_gpus / request.gpus_per_node))
    size = max(sum(rank.peak_by_kind.get(kind, 0) for kind in _KEPT) for rank in found.ranks)
    rate = found.gpu.host * found.gpu.rates.copy if recipe.checkpoint.async_save else 1e9
    return Cluster(
        nodes=nodes,
        step=found.step_seconds,
        node_mtbf=_never(assumed.gpu_mtbf_hours) / min(request.gpus_per_node, request.num_gpus),
        save=size / rate if assumed.save_seconds is None else assumed.save_seconds,
        restart=assumed.restart_minutes * 60,
        spares=assumed.spare_nodes,
        repair=assumed.repair_hours * HOURS,
        slow_mtbf=_never(assumed.slow_node_hours),
        slow_for=assumed.slow_for_hours * HOURS,
        slow_factor=assumed.slow_factor,
    )


def _never(hours: float) -> float:
    return hours * HOURS if hours else math.inf


def _rendered(lines: list[tuple[str, Goodput]], found: Estimate) -> str:
    width = max((len(name) for name, _ in lines), default=0)
    heads = f"{'':{width}}  goodput  lost  restarts  checkpoints  slow nodes  kept tokens/s/GPU"
    rows = []
    for name, one in lines:
        kept = found.throughput.times(one.kept)
        shares = f"{one.kept:7.1%} {one.lost:5.1%} {one.restart:9.1%} {one.save:12.1%} {one.slow:z11.1%}"
        rows.append(f"{name:{width}}  {shares}  {spread(kept.low, kept.high)}")
    return "\n".join([heads, *rows])


def _hierarchical(found: Estimate, request: TraceRequest, cluster: Cluster) -> list[str]:
    """What sharding inside nodes changes, where communication between nodes is exposed."""
    exposed = found.seconds.get("network", 0.0) / found.step_seconds
    if cluster.nodes == 1 or found.timeline is not None or exposed < 0.01:
        return []
    lines = [f"\nexposed communication between nodes: {exposed:.0%} of the step"]
    word = f"mesh.dp_replicate_size={cluster.nodes}"
    try:
        other = trace_config(replace(request, overrides=(*request.overrides, word)), (0,))
    except ConfigError:  # the config has replicas, or the axes of a node do not allow them
        return lines
    fits = "" if other.fits else f", but does not fit ({other.heaviest.peak / GIB:.0f} GiB)"
    rate = other.throughput
    return [*lines, f"{word}: {spread(rate.low, rate.high)} tokens/s/GPU{fits}"]
