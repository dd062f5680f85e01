"""Checks of several nodes: network bandwidth, latency, a shared folder and equal software versions."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from automodel_cli.config.diagnostics import Finding
from automodel_cli.distributed import process_group
from automodel_cli.run import shared_directory
from automodel_cli.run.shared_directory import all_gather_values, host

_SMALL, _LARGE = 1, 1 << 24
"""Sizes in float32 values: the scalars of a step, and 64 MiB as a gradient bucket."""
_SLOW_GB = {"cuda": 5.0, "cpu": 0.05}
"""GB/s below which training waits for the network: a fifth of 200 Gbit/s, and half of Gigabit Ethernet."""


def examine_nodes(folder: Path) -> Iterator[Finding]:
    """Findings of all ranks together, the same on each. Starts and stops the process group. Collective."""
    with process_group.process_group("nccl") as device:
        yield from _software(device)
        yield _latency(device)
        yield _bandwidth(device)
        yield _shared(folder)


def _software(device: torch.device) -> Iterator[Finding]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    local = {"python": platform.python_version(), "torch": torch.__version__, "device": name}
    versions = all_gather_values({"host": host(), **local})
    hosts = list(dict.fromkeys(rank["host"] for rank in versions))
    kind = "nccl" if device.type == "cuda" else "gloo"
    yield "ok", "ranks", f"{len(versions)} on {len(hosts)} hosts: {', '.join(hosts)} ({kind})", ""
    for what in local:
        by_rank: dict[str, str] = {rank[what]: rank["host"] for rank in versions}
        if len(by_rank) > 1:
            text = ", ".join(f"{value} on {host}" for value, host in by_rank.items())
            yield ("warn" if what == "device" else "fail"), what, f"differs between hosts: {text}", ""
        else:
            yield "ok", what, f"{next(iter(by_rank))} on all hosts", ""


def _latency(device: torch.device) -> Finding:
    seconds = _all_reduce(_SMALL, device, repeat=20)
    return "ok", "latency", f"{seconds * 1e6:.0f} us for an all-reduce of one number", ""


def _bandwidth(device: torch.device) -> Finding:
    """Of the slowest link: an all-reduce of n ranks moves 2 (n - 1) / n of its bytes over each."""
    size = dist.get_world_size()
    rate = 2 * (size - 1) / size * 4 * _LARGE / _all_reduce(_LARGE, device, repeat=5) / 1e9
    text = f"{rate:.2f} GB/s between ranks (bus bandwidth of an all-reduce of 64 MiB)"
    if rate < _SLOW_GB[device.type]:
        variable = "NCCL_SOCKET_IFNAME" if device.type == "cuda" else "GLOO_SOCKET_IFNAME"
        return "warn", "bandwidth", text, f"export {variable}=ib0   (the fast interface; NCCL_DEBUG=INFO names it)"
    return "ok", "bandwidth", text, ""


def _shared(folder: Path) -> Finding:
    """Return whether other ranks can read a file in `folder` that rank 0 has written."""
    if problems := shared_directory.problems(folder):
        text = f"{folder} is not the same folder everywhere: {'; '.join(problems)}"
        return "fail", "shared folder", text, "cd /a/shared/file/system   (or output_dir=/a/shared/file/system/runs)"
    return "ok", "shared folder", f"{folder} is shared by all ranks", ""


def _all_reduce(numel: int, device: torch.device, *, repeat: int) -> float:
    """Seconds of one, the slowest rank's mean."""
    values = torch.zeros(numel, device=device)
    for _ in range(2):
        dist.all_reduce(values)  # connections
    _wait(device)
    begin = time.perf_counter()
    for _ in range(repeat):
        dist.all_reduce(values)
    _wait(device)
    return float(max(all_gather_values((time.perf_counter() - begin) / repeat)))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
