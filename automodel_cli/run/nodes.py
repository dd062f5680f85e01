"""What ranks on several nodes find out together: bandwidth, latency, a folder that all see, equal software."""

from __future__ import annotations

import os
import platform
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from automodel_cli.config.problems import Finding
from automodel_cli.distributed import process_group

_SMALL, _LARGE = 1, 1 << 24
"""float32 values: what a step's scalars need, and 64 MiB, as a bucket of gradients."""
_SLOW_GB = {"cuda": 5.0, "cpu": 0.05}
"""GB/s below which training waits for the network: a fifth of 200 Gbit/s, and half of Gigabit Ethernet."""
_SECONDS_TO_SEE = 10.0


def examine_nodes(folder: Path) -> Iterator[Finding]:
    """Findings of all ranks together, the same on each. Starts and stops the process group. Collective."""
    device = process_group.start("nccl")
    try:
        yield from _software(device)
        yield _latency(device)
        yield _bandwidth(device)
        yield _shared(folder)
    finally:
        process_group.stop()


def _software(device: torch.device) -> Iterator[Finding]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    mine = {"python": platform.python_version(), "torch": torch.__version__, "device": name}
    told = _gathered({"host": _host(), **mine})
    hosts = list(dict.fromkeys(rank["host"] for rank in told))
    kind = "nccl" if device.type == "cuda" else "gloo"
    yield "ok", "ranks", f"{len(told)} on {len(hosts)} hosts: {', '.join(hosts)} ({kind})", ""
    for what in mine:
        found: dict[str, str] = {rank[what]: rank["host"] for rank in told}
        if len(found) > 1:
            text = ", ".join(f"{value} on {host}" for value, host in found.items())
            yield ("warn" if what == "device" else "fail"), what, f"not the same everywhere: {text}", ""
        else:
            yield "ok", what, f"{next(iter(found))} everywhere", ""


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
    """Whether what rank 0 writes in `folder` is what the others read there."""
    word: list[Any] = [secrets.token_hex(8)]
    dist.broadcast_object_list(word, src=0, device=torch.device("cpu"))
    path = folder / f".automodel-nodes-{word[0]}"
    wrong = ""
    if dist.get_rank() == 0:
        try:
            path.write_text(word[0])
        except OSError as error:
            wrong = f"rank 0 cannot write there: {error.strerror}"
    _gathered(None)
    if not wrong and not _within(_SECONDS_TO_SEE, lambda: path.exists() and path.read_text() == word[0]):
        wrong = _host()
    told = [text for text in _gathered(wrong) if text]
    if dist.get_rank() == 0:
        with suppress(OSError):
            path.unlink()
    if told:
        text = f"{folder} is not the same folder everywhere: not seen on {', '.join(dict.fromkeys(told))}"
        return "fail", "shared folder", text, "cd /a/shared/file/system   (or output_dir=/a/shared/file/system/runs)"
    return "ok", "shared folder", f"{folder} is one for all ranks", ""


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
    return max(_gathered((time.perf_counter() - begin) / repeat))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gathered(value: Any) -> list[Any]:
    """Of every rank. Collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def _within(seconds: float, ready: Callable[[], bool]) -> bool:
    """A network file system may show a new file late."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _host() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
