"""Goodput of a run on many nodes: the share of wall time that becomes training that is kept. Torch-free.

Nodes fail at exponential intervals. A failure costs the steps since the last checkpoint, the restart, and the wait for
a node if no spare is left. Nodes also turn slow for a while, and all others wait for them in every step.

`expected` has closed forms (Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006,
and renewal theory), `simulate` an event simulation of what they leave out: spares that run out.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

HOURS = 3600.0


@dataclass(frozen=True)
class Cluster:
    """What happens to a run. Times in seconds.

    Args:
        nodes: nodes of the run.
        step: one step without disturbance.
        node_mtbf: mean time between failures of a node; inf for none.
        save: training stands still for a checkpoint.
        restart: from a failure until the first step, on nodes that are there.
        spares: nodes that stand by. None: a node is always there.
        repair: until a failed node stands by again.
        slow_mtbf: mean time until a node turns slow; inf for never.
        slow_for: until it is replaced or recovers.
        slow_factor: its step time over that of the others.
    """

    nodes: int
    step: float
    node_mtbf: float = math.inf
    save: float = 0.0
    restart: float = 0.0
    spares: int | None = None
    repair: float = 0.0
    slow_mtbf: float = math.inf
    slow_for: float = 0.0
    slow_factor: float = 1.0

    @property
    def mtbf(self) -> float:
        """Mean time between failures of the run."""
        return self.node_mtbf / self.nodes

    @property
    def slow_share(self) -> float:
        """Share of time in which at least one node is slow: the queue M/G/infinity is not empty."""
        return 1.0 - math.exp(-self.nodes * self.slow_for / self.slow_mtbf)

    @property
    def slowdown(self) -> float:
        """Mean time of a step over its undisturbed time."""
        # Example: 100 nodes, one slow hour in 1,000. slow_share = 1 - exp(-0.1) = 0.095. With a factor of 1.5, steps
        # take 3.3% longer on average.
        return 1.0 / (1.0 - self.slow_share + self.slow_share / self.slow_factor)


@dataclass(frozen=True)
class Goodput:
    """Shares of wall time, which sum to 1. `kept`: undisturbed time of the steps that are kept."""

    kept: float
    slow: float
    save: float
    lost: float
    restart: float


def best_interval(cluster: Cluster) -> float:
    """Return the steps between checkpoints with the highest goodput, by Daly's equation 37. inf without failures."""
    mtbf, save = cluster.mtbf, cluster.save
    if math.isinf(mtbf):
        return math.inf
    # Daly's bound: the series below holds for save < 2 M only.
    if save >= 2 * mtbf:
        return max(mtbf / (cluster.step * cluster.slowdown), 1.0)
    # Example: 10 h between failures and 50 s per checkpoint give 1,864 s of work between checkpoints, 186 steps of 10
    # s.
    ratio = math.sqrt(save / (2 * mtbf))
    seconds = math.sqrt(2 * save * mtbf) * (1 + ratio / 3 + ratio**2 / 9) - save
    return max(seconds / (cluster.step * cluster.slowdown), 1.0)


def expected(cluster: Cluster, interval: float) -> float:
    """Return the goodput with a checkpoint every `interval` steps, for a node that is always there (`spares=None`) or
    never before the repair (`spares=0`).

    A segment of work w with its checkpoint takes M exp(R / M) (exp((w + save) / M) - 1) of time on nodes that can fail
    with a mean time M; every failure on the way adds the wait for the repair.
    """
    mtbf, work = cluster.mtbf, interval * cluster.step
    span = work * cluster.slowdown + cluster.save
    if math.isinf(mtbf):
        return work / span
    # exp(500) is near the end of float64.
    if (span + cluster.restart) / mtbf > 500:
        return 0.0  # never reaches the checkpoint
    running = mtbf * math.exp(cluster.restart / mtbf) * math.expm1(span / mtbf)
    waits = running / mtbf * (cluster.repair if cluster.spares == 0 else 0.0)
    return work / (running + waits)


def simulate(cluster: Cluster, interval: float, *, seconds: float, seed: int = 0) -> Goodput:
    """Run the events of `seconds` of wall time."""
    run = _Run(cluster, random.Random(seed), seconds)
    while run.now < seconds:
        run.segment(interval * cluster.step)
    spent = run.spent
    whole = sum(spent.values())
    shares = {name: value / whole for name, value in spent.items()}
    return Goodput(shares["kept"], shares["slow"], shares["save"], shares["lost"], shares["restart"])


class _Run:
    """Clock, nodes under repair and slow nodes of a simulated run."""

    def __init__(self, cluster: Cluster, source: random.Random, end: float):
        self.cluster, self.source, self.end = cluster, source, end
        self.now, self.slow_until = 0.0, 0.0
        self.fails_at = self._next(cluster.mtbf)
        self.turns_slow_at = self._next(cluster.slow_mtbf / cluster.nodes)
        self.repaired_at: list[float] = []
        self.spent = dict.fromkeys(("kept", "slow", "save", "lost", "restart"), 0.0)

    def _next(self, mean: float) -> float:
        return self.now + (math.inf if math.isinf(mean) else self.source.expovariate(1 / mean))

    def segment(self, work: float) -> None:
        """Work and its checkpoint, until it is on disk or the time is over."""
        while self.now < self.end:
            began = self.now
            if self._work(work) and self._pass(self.cluster.save):
                self.spent["kept"] += work
                self.spent["save"] += self.cluster.save
                self.spent["slow"] += self.now - began - work - self.cluster.save
                return
            self.spent["lost"] += self.now - began
            self._restart()

    def _work(self, work: float) -> bool:
        """Undisturbed seconds of steps, at the pace of the slowest node. False if a node fails before."""
        left = work
        while left > 1e-6:
            is_slow = self.slow_until > self.now
            pace = 1 / self.cluster.slow_factor if is_slow else 1.0
            until = min(self.now + left / pace, self.turns_slow_at, self.slow_until if is_slow else math.inf)
            if self.fails_at <= until:
                self.now = self.fails_at
                return False
            left -= (until - self.now) * pace
            self.now = until
            self._slow_events()
        return True

    def _slow_events(self) -> None:
        while self.turns_slow_at <= self.now:
            self.slow_until = max(self.slow_until, self.turns_slow_at + self.cluster.slow_for)
            self.turns_slow_at += self._next(self.cluster.slow_mtbf / self.cluster.nodes) - self.now

    def _pass(self, seconds: float) -> bool:
        """False if a node fails before these seconds are over."""
        if self.fails_at <= self.now + seconds:
            self.now = self.fails_at
            return False
        self.now += seconds
        self._slow_events()
        return True

    def _restart(self) -> None:
        """After a failure, until the first step: wait for a node, and start again, which can fail too."""
        began, cluster = self.now, self.cluster
        while self.now < self.end:
            self.repaired_at = sorted(at for at in self.repaired_at if at > self.now)
            if cluster.spares is not None:
                self.repaired_at.append(self.now + cluster.repair)
                missing = len(self.repaired_at) - cluster.spares
                if missing > 0:
                    self.now = self.repaired_at[missing - 1]
            self.fails_at = self._next(cluster.mtbf)
            if self._pass(cluster.restart):
                self._slow_events()
                break
        self.spent["restart"] += self.now - began


def table(cluster: Cluster, configured: float | None, *, seconds: float, seed: int = 0) -> list[tuple[str, Goodput]]:
    """Return what the checkpoint interval and spare nodes change, with the name of each line."""
    best = best_interval(cluster)
    lines: list[tuple[str, Cluster, float]] = []
    if configured is not None:
        lines.append((f"checkpoint.every={configured:g}, as configured", cluster, configured))
    if math.isfinite(best):
        lines += [(f"checkpoint.every={max(1, round(best * f))}", cluster, best * f) for f in (0.25, 1.0, 4.0)]
    at = configured if configured is not None else best
    if math.isfinite(at):
        others = [spares for spares in (0, 1, 2, 4) if spares != cluster.spares]
        every = max(1, round(at))
        lines += [(f"--spare-nodes {n}, every {every} steps", replace(cluster, spares=n), at) for n in others]
    return [(name, simulate(one, every, seconds=seconds, seed=seed)) for name, one, every in lines]
