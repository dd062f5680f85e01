"""Simulated clocks: what a span of time consists of, and that hidden work costs nothing but its interference."""

from __future__ import annotations

import pytest

from automodel_cli.planning.efficiency import Efficiency
from automodel_cli.planning.simulated_clock import Clock, critical_path

NO_HOST = Efficiency(host=0.0)


def test_a_hidden_collective_is_not_on_the_critical_path() -> None:
    clock = Clock(NO_HOST)
    clock.kernel("gemm", 1.0)
    end = clock.collective("dp", "node", 2.0, asynchronous=True)
    clock.kernel("gemm", 3.0)
    clock.wait(0, end)
    clock.kernel("memory", 0.5)
    assert critical_path(0.0, clock.now()) == pytest.approx({"gemm": 4.0, "memory": 0.5, "interference": 0.0})


def test_an_exposed_collective_counts_as_far_as_it_is_exposed() -> None:
    clock = Clock(NO_HOST)
    end = clock.collective("dp", "network", 2.0, asynchronous=True)
    clock.kernel("gemm", 0.5)
    clock.wait(0, end)
    began = clock.at(0)
    clock.kernel("memory", 1.0)
    assert critical_path(0.0, clock.now()) == pytest.approx({"network": 2.0, "memory": 1.0})
    assert critical_path(began, clock.now()) == pytest.approx({"memory": 1.0})
    assert critical_path(0.5, clock.now()) == pytest.approx({"network": 1.5, "memory": 1.0}), (
        "cut where the span begins"
    )


def test_kernels_beside_a_collective_lose_a_share_of_its_time() -> None:
    clock = Clock(Efficiency(host=0.0, interference=0.1))
    clock.collective("dp", "node", 2.0, asynchronous=True)
    clock.kernel("gemm", 3.0)
    assert critical_path(0.0, clock.now()) == pytest.approx({"gemm": 3.0, "interference": 0.2})


def test_a_short_kernel_waits_for_its_launch() -> None:
    clock = Clock(Efficiency(host=2.0))
    clock.kernel("gemm", 1.0)
    clock.kernel("gemm", 1.0)
    path = critical_path(0.0, clock.now())
    assert path == pytest.approx({"host": 4.0, "gemm": 1.0}) and sum(path.values()) == pytest.approx(clock.now())
