"""The simulation of failures and stragglers against closed forms."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from automodel_cli.planning.goodput import HOURS, Cluster, best_interval, expected, simulate

LONG = 1000 * 24 * HOURS
FAILING = Cluster(nodes=64, step=3.0, node_mtbf=250 * 24 * HOURS, save=60.0, restart=600.0)


def test_without_events_all_time_is_kept() -> None:
    found = simulate(Cluster(nodes=8, step=2.0), 100, seconds=1e5)
    assert (found.kept, found.lost, found.restart) == (1.0, 0.0, 0.0)


def test_checkpoints_alone_cost_their_share() -> None:
    found = simulate(Cluster(nodes=8, step=2.0, save=20.0), 90, seconds=1e6)
    assert found.kept == pytest.approx(180 / 200) and found.save == pytest.approx(20 / 200)


@pytest.mark.parametrize("interval", [50, 400, 3000])
def test_failures_agree_with_the_renewal_process(interval: int) -> None:
    """exp((w + save) / M) segments, whatever the interval; restarts fail as well."""
    found = simulate(FAILING, interval, seconds=LONG * min(interval / 400, 1))
    assert found.kept == pytest.approx(expected(FAILING, interval), rel=0.01)
    assert sum(vars(found).values()) == pytest.approx(1.0)


def test_restarts_that_take_as_long_as_failures_are_apart_agree_too() -> None:
    """Where half of the restarts fail."""
    cluster = replace(FAILING, node_mtbf=64 * 1800.0, restart=1200.0)
    assert simulate(cluster, 100, seconds=LONG / 8).kept == pytest.approx(expected(cluster, 100), rel=0.03)


def test_the_best_interval_is_dalys_and_the_best_of_the_closed_form() -> None:
    best = best_interval(FAILING)
    young = math.sqrt(2 * FAILING.save * FAILING.mtbf) / FAILING.step
    assert best == pytest.approx(young, rel=0.05)
    intervals = [best * factor for factor in (0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 2.0)]
    goodputs = [expected(FAILING, interval) for interval in intervals]
    assert max(goodputs) - goodputs[3] < 1e-5 and goodputs[0] < goodputs[3] > goodputs[-1]


def test_without_a_spare_every_failure_waits_for_the_repair() -> None:
    cluster = replace(FAILING, spares=0, repair=12 * HOURS)
    found = simulate(cluster, 400, seconds=2 * LONG)
    assert found.kept == pytest.approx(expected(cluster, 400), rel=0.02)
    endless = simulate(replace(cluster, spares=64), 400, seconds=LONG)
    assert endless.kept == pytest.approx(expected(FAILING, 400), rel=0.01)


def test_spares_help_less_and_less() -> None:
    cluster = replace(FAILING, repair=24 * HOURS)
    kept = [simulate(replace(cluster, spares=spares), 400, seconds=LONG).kept for spares in (0, 1, 4)]
    assert kept[0] < kept[1] <= kept[2] and kept[1] - kept[0] > kept[2] - kept[1]


def test_slow_nodes_slow_all_others_while_any_is_slow() -> None:
    cluster = Cluster(nodes=64, step=1.0, slow_mtbf=64 * 10 * HOURS, slow_for=5 * HOURS, slow_factor=1.5)
    assert cluster.slow_share == pytest.approx(1 - math.exp(-0.5))
    found = simulate(cluster, 100, seconds=LONG)
    assert found.kept == pytest.approx(1 / cluster.slowdown, rel=0.01)
    assert found.slow == pytest.approx(1 - 1 / cluster.slowdown, rel=0.02)


def test_a_run_that_never_reaches_its_checkpoint_keeps_nothing() -> None:
    cluster = replace(FAILING, node_mtbf=64 * 60.0)
    assert expected(cluster, 100_000) == 0.0 and simulate(cluster, 100_000, seconds=1e6).kept == 0.0
