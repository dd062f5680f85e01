"""What offloading costs in a dry run: copies between host and device, and work on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from automodel_cli.dryrun.fake_device import fake_cuda, fake_tensor_compat
from automodel_cli.dryrun.fake_device.collectives import Collectives
from automodel_cli.dryrun.fake_device.dispatch_mode import TracedRank
from automodel_cli.dryrun.fake_device.fake_cuda import CUDA
from automodel_cli.dryrun.fake_device.memory import MemoryTracker
from automodel_cli.planning.hardware import GPUS, Links
from automodel_cli.planning.simulated_clock import Clock
from tests.dist.harness import launch

_NUMBERS = 1 << 28
_COPY = 4 * _NUMBERS / (64e9 * 0.7)  # seconds over the link
_LAUNCH = 5e-6


def _copies(rank: int, world: int) -> dict[str, Any]:
    """Clocks after each call: the host's, the first stream's, a second one's."""
    clock, gpu = Clock(), GPUS["h100"]
    mode = TracedRank(gpu, clock, MemoryTracker(lambda: ""), Collectives(clock, Links(gpu.link)), "balanced")
    mode.counts.on = True
    found: dict[str, Any] = {}
    with fake_tensor_compat.install_fake_cuda(CUDA), mode:
        fake_cuda.pretend(gpu, clock, mode.synchronised)
        side: Any = torch.cuda.Stream()

        def now(name: str) -> None:
            found[name] = clock.host, clock.at(0), clock.at(side.number)

        host = torch.empty(_NUMBERS)
        device = host.to(CUDA, non_blocking=True)
        now("to device")
        with torch.cuda.stream(side):
            kept = device.to("cpu", non_blocking=True)
        now("to host, on another stream")
        host.copy_(device)
        now("to host, waited for")
        kept.add_(host)
        now("sum on the host")
    found["waits"] = sum(mode.counts.syncs.values())
    return found


def test_copies_take_the_links_time_beside_the_other_direction_and_the_hosts_memory_its_own() -> None:
    found = launch(_copies, 1, timeout=120, process_group=False)
    assert found["to device"] == pytest.approx((_LAUNCH, _LAUNCH + _COPY, 0))
    assert found["to host, on another stream"] == pytest.approx((2 * _LAUNCH, _LAUNCH + _COPY, 2 * _LAUNCH + _COPY))
    host, first, _ = found["to host, waited for"]
    assert (host, first) == pytest.approx((2 * _LAUNCH + 2 * _COPY,) * 2), "one after the other in one direction"
    assert found["waits"] == 1
    assert found["sum on the host"][0] - host == pytest.approx(3 * 4 * _NUMBERS / 40e9)
