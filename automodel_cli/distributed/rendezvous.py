"""Rendezvous of the ranks: connect to the store at MASTER_ADDR, wait for all ranks, and select the interface of gloo.

torch's own rendezvous blocks in C++ until its timeout. It handles no signals, and reports neither a name that does not
resolve nor a missing rank. This one waits in Python. A rank that cannot start writes the reason to the store, and every
rank ends with it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TypedDict

import torch.distributed as dist

from automodel_cli.config.errors import RunError
from automodel_cli.launch import environment, network_interfaces, signals

REPORT_SECONDS = 30.0
"""Seconds until a rank first prints its wait."""
RESOLVE_SECONDS = 60.0
"""A host name may resolve late (a pod with a new service)."""
_IFNAME = "GLOO_SOCKET_IFNAME"
_POLL, _CONNECT_SECONDS = 0.1, 3.0


def meet(rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Return the store of this attempt after all ranks have connected. Raises RunError."""
    # torch's launcher keeps its store when it restarts the ranks, so it contains addresses of earlier attempts.
    attempt = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store = dist.PrefixStore(attempt, _store(rank, timeout))
    everyone = _presence(store, rank, world_size, timeout)
    for other, about in everyone.items():
        if about["problem"]:
            raise RunError(
                f"rank {other} on {about['host']} cannot start: {about['problem']}",
                code="rendezvous_failed",
                fix=about["fix"],
            )
    _choose_interface(rank, everyone)
    return store


def unconnected(error: BaseException) -> RunError:
    """Return the error for ranks that reached the store but cannot connect to each other."""
    reason = (str(error).splitlines() or ["no reason given"])[0]
    name = os.environ.get(_IFNAME, "not set")
    return RunError(
        f"rank {os.environ.get('RANK', '0')} on {_host()} reached MASTER_ADDR={_master()[0]} but cannot connect to "
        f"the other ranks ({_IFNAME} is {name}): {reason}",
        code="rendezvous_failed",
        keys=("GLOO_SOCKET_IFNAME",),
        fix=f"export {_IFNAME}=eth0 on every host: the interface that reaches the other hosts (`ip -br address`)",
    )


def _store(rank: int, timeout: timedelta) -> dist.Store:
    host, port = _master()
    if rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        try:
            return dist.TCPStore(
                "127.0.0.1", port, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True
            )
        except RuntimeError as error:  # A DistNetworkError.
            raise RunError(
                f"rank 0 on {_host()} cannot listen on MASTER_PORT={port}: {str(error).splitlines()[0]}",
                code="rendezvous_failed",
                keys=("MASTER_PORT",),
                fix=f"export MASTER_PORT={port + 1}",
            ) from None
    _wait_for_server(rank, host, port, timeout)
    return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


def _wait_for_server(rank: int, host: str, port: int, timeout: timedelta) -> None:
    """Wait until something accepts connections at `host`."""
    wait = _Wait(f"rank {rank} on {_host()} waits for rank 0 at MASTER_ADDR={host}, port {port}", timeout)
    while True:
        try:
            socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
            return
        except socket.gaierror as error:
            if wait.seconds() > RESOLVE_SECONDS:
                raise RunError(
                    f"MASTER_ADDR={host} cannot be resolved on {_host()}: {error.strerror}",
                    code="rendezvous_failed",
                    keys=("MASTER_ADDR",),
                    fix="MASTER_ADDR=an address of the first host that every host reaches   "
                    "(torchrun: --master-addr or --local-addr)",
                ) from None
            wait.on(f"{host} does not resolve: {error.strerror}")
        except OSError as error:
            wait.on(error.strerror or "no response")


class _Presence(TypedDict):
    """What a rank publishes. `problem` and `fix` are empty if its interface is valid."""

    host: str
    address: str | None
    problem: str
    fix: str


def _presence(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dict[int, _Presence]:
    """Return the information that each rank has published. Rank 0 waits for all ranks, the others wait for rank 0."""
    problem, fix = _wrong_interface()
    local: _Presence = {
        "host": _host(),
        "address": network_interfaces.source_address(_master()[0]),
        "problem": problem,
        "fix": fix,
    }
    store.set(f"rank-{rank}", json.dumps(local))
    if rank == 0:
        wait = _Wait("rank 0 waits for the other ranks", timeout)
        missing = list(range(1, world_size))
        while missing := [other for other in missing if not store.check([f"rank-{other}"])]:
            wait.on(_missing(missing, world_size))
        everyone: dict[int, _Presence] = {other: json.loads(store.get(f"rank-{other}")) for other in range(world_size)}
        store.set("everyone", json.dumps(everyone))
        if any(about["problem"] for about in everyone.values()):
            _wait_until_all_have_read(store, world_size)
        return everyone
    wait = _Wait(f"rank {rank} on {_host()} waits until all ranks have connected to rank 0", timeout)
    while not store.check(["everyone"]):
        wait.on("some ranks have not started. Rank 0 prints which")
    everyone = {int(other): about for other, about in json.loads(store.get("everyone")).items()}
    store.add("heard", 1)
    return everyone


def _wait_until_all_have_read(store: dist.Store, world_size: int) -> None:
    """Keep the store of this process alive until the others have read the error."""
    deadline = time.monotonic() + 5.0
    while store.add("heard", 0) < world_size - 1 and time.monotonic() < deadline:
        time.sleep(_POLL)


def _missing(ranks: Sequence[int], world_size: int) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    where = f" (nodes of the job: {nodes})" if nodes else ""
    return f"{len(ranks)} of {world_size} ranks have not connected: {shown}{where}"


def _wrong_interface() -> tuple[str, str]:
    """Return why GLOO_SOCKET_IFNAME is invalid here, and a fix. Empty texts if it is valid."""
    requested = [name for name in os.environ.get(_IFNAME, "").split(",") if name]
    available = network_interfaces.interface_names()
    wrong = [name for name in requested if name not in available]
    if not wrong:
        return "", ""
    return (
        f"{_IFNAME}={wrong[0]} is not an interface of {_host()}, which has {', '.join(available)}",
        f"unset {_IFNAME}   (the interface that reaches MASTER_ADDR is used), or export {_IFNAME}={available[-1]}",
    )


def _choose_interface(rank: int, everyone: Mapping[int, _Presence]) -> None:
    """Set the interface of gloo to the one that reaches the other hosts, unless the user has set one.

    gloo uses the address of the host name, which is 127.0.1.1 on many clusters. On the host of MASTER_ADDR that name
    may also resolve to a loopback address. The address of another host then determines the interface.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == len(everyone):
        return
    local_address = everyone[rank]["address"]
    if local_address is None or network_interfaces.is_loopback(local_address):
        others = [about["address"] for about in everyone.values() if about["address"] not in (None, local_address)]
        other = next((address for address in others if not network_interfaces.is_loopback(address)), None)
        local_address = network_interfaces.source_address(other) if other is not None else None
    if (
        local_address is not None
        and not network_interfaces.is_loopback(local_address)
        and (name := network_interfaces.addresses().get(local_address))
    ):
        environment.set_default(_IFNAME, name)


class _Wait:
    """A wait that is printed after a while, and ends at the timeout or at a signal."""

    def __init__(self, what: str, timeout: timedelta):
        self._label, self._timeout = what, timeout.total_seconds()
        self._began, self._report_at = time.monotonic(), REPORT_SECONDS

    def seconds(self) -> float:
        """Return the seconds since the start of the wait."""
        return time.monotonic() - self._began

    def on(self, reason: str) -> None:
        """Wait for a moment. Raises RunError at the timeout or at a signal."""
        text = f"{self._label} since {self.seconds():.0f} s: {reason}"
        if (signum := signals.requested()) is not None:
            error = RunError(
                f"{signum.name} while {text}. Nothing was trained", code="interrupted", fix="run the same command again"
            )
            error.exit_code = signals.exit_code()
            raise error
        if self.seconds() > self._timeout:
            raise RunError(
                text,
                code="timeout",
                fix="read logs/rank-N.log, or the output of the other host, to find why they do not start",
            )
        if self.seconds() > self._report_at:
            self._report_at *= 4
            if int(os.environ.get("LOCAL_RANK", "0")) == 0 or os.environ.get("RANK") == "0":
                print(text, file=sys.stderr, flush=True)
        time.sleep(_POLL)


def _master() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _host() -> str:
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
