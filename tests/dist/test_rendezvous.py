"""How ranks meet: who is missing, a name that does not resolve, a wrong interface, a signal while a rank waits."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import socket
from datetime import timedelta
from typing import Any

import pytest

from automodel_cli.config.errors import RunError
from automodel_cli.distributed import rendezvous
from automodel_cli.launch import environment, network_interfaces, signals
from tests.dist.harness import launch, launch_all


def _error(timeout: float = 60.0) -> tuple[RunError, str]:
    """The error of this rank's meeting, and what it has printed."""
    printed = io.StringIO()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with contextlib.redirect_stderr(printed), pytest.raises(RunError) as caught:
        rendezvous.meet(rank, world, timedelta(seconds=timeout))
    return caught.value, printed.getvalue()


def _without_the_last_rank(rank: int, world: int) -> Any:
    rendezvous.REPORT_SECONDS = 0.3
    if rank == world - 1:
        return None
    error, printed = _error(timeout=1.0 if rank == 0 else 3.0)
    return str(error), printed


def test_a_rank_that_does_not_come_is_named() -> None:
    (said, printed), (_, of_rank_1), _ = launch_all(_without_the_last_rank, 3, process_group=False)
    assert " of 3 ranks " in printed and re.search(r"\b1 of 3 ranks .*: 2\b", said)
    assert "Rank 0 prints" not in printed and of_rank_1.count("rank 1 on ") <= 2


def _nowhere(rank: int, world: int) -> Any:
    rendezvous.RESOLVE_SECONDS = 0.2
    os.environ.update(MASTER_ADDR="nowhere.invalid", RANK="1", WORLD_SIZE="2")
    unknown, _ = _error()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    signals.install_handlers()
    os.kill(os.getpid(), signal.SIGTERM)
    told, _ = _error()
    return str(unknown), unknown.fix, str(told), told.exit_code


def test_a_name_that_does_not_resolve_and_a_signal_end_the_wait() -> None:
    unknown, fix, told, code = launch(_nowhere, 1, process_group=False)
    assert "MASTER_ADDR=nowhere.invalid" in unknown and socket.gethostname() in unknown
    assert "--master-addr" in fix and code == 75
    assert told.startswith("SIGTERM while rank 1 on ") and "waits for rank 0 at MASTER_ADDR=127.0.0.1" in told


def _wrong_interface(rank: int, world: int) -> str:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if rank == 0 else "nope0"
    return str(_error()[0])


def test_a_wrong_interface_on_one_host_ends_every_rank_with_the_same_words() -> None:
    first, second = launch_all(_wrong_interface, 2, process_group=False)
    assert first == second and first.startswith("rank 1 on ")
    assert "GLOO_SOCKET_IFNAME=nope0" in first and "lo" in first


def test_the_interface_is_the_one_that_reaches_the_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host of MASTER_ADDR its name may be 127.0.1.1; where ranks of other hosts are shows the way."""
    found = network_interfaces.addresses()
    assert found["127.0.0.1"] == "lo" and set(found.values()) <= set(network_interfaces.interface_names())
    outward = next((a for a in found if not network_interfaces.is_loopback(a) and ":" not in a), None)
    if outward is None:
        pytest.skip("this machine has no address but loopback")
    for mine in (outward, "127.0.1.1"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
        monkeypatch.setenv(environment.OWN, "")
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        rendezvous._choose_interface(0, {0: {"address": mine}, 1: {"address": outward}})
        assert os.environ["GLOO_SOCKET_IFNAME"] == found[outward]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    rendezvous._choose_interface(0, {0: {"address": "127.0.1.1"}, 1: {"address": "127.0.0.1"}})
    assert "GLOO_SOCKET_IFNAME" not in os.environ, "one host by another name"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    rendezvous._choose_interface(0, {0: {"address": outward}, 1: {"address": outward}})
    assert "GLOO_SOCKET_IFNAME" not in os.environ, "one host"


def test_groups_that_cannot_connect_name_the_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MASTER_ADDR", "n1"), ("MASTER_PORT", "1"), ("RANK", "3"), ("GLOO_SOCKET_IFNAME", "eth7")):
        monkeypatch.setenv(name, value)
    error = rendezvous.unconnected(RuntimeError("Gloo connectFullMesh failed with [10.0.0.7]: No route to host\nmore"))
    assert "GLOO_SOCKET_IFNAME is eth7" in str(error) and "No route to host" in str(error) and "more" not in str(error)
    assert error.fix is not None and error.fix.startswith("export GLOO_SOCKET_IFNAME=")
