"""Which rank a hang is blamed on, by what the ranks told; the whole of it runs in tests/e2e/test_faults.py."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from automodel_cli.distributed import process_group
from automodel_cli.training.monitors import watchdog
from automodel_cli.training.monitors.stall_report import last_collective, sentence, waits
from automodel_cli.training.monitors.watchdog import FIRST_SECONDS, Watchdog
from automodel_cli.training.step import wait_for_device
from tests.dist.harness import RankFailure, launch
from tests.errors import assert_error


def told(rank: int, *, beats: int = 9, step: int = 7, waits: bool = True, at: str = "all_reduce (c10d.py:1)") -> Any:
    common = {"where": "microbatch 2 of 4", "seconds": 12.0, "host": f"node{rank // 2}", "pid": 4000 + rank}
    return {"rank": rank, "beats": beats, "step": step, "waits": waits, "at": at, **common}


def blamed(after: list[Any], before: dict[int, int] | None = None) -> str:
    """`before`: how many beats a rank had told some time earlier; else fewer than now."""
    earlier = {state["rank"]: {**state, "beats": (before or {}).get(state["rank"], 5)} for state in after}
    return sentence(earlier, {state["rank"]: state for state in after}, None, Path("logs"))


def test_a_rank_that_tells_nothing_any_more_comes_before_one_that_is_elsewhere() -> None:
    ranks = [told(0), told(1, waits=False, at="read (io.py:3)"), told(2, beats=5), told(3)]
    said = blamed(ranks)
    assert said.startswith("rank 2 (process 4002 on node1) stands still: tells nothing any more")
    assert (
        "last heard of in step 7, microbatch 2 of 4, 12 s ago; 2 of the 3 others wait in all_reduce (c10d.py:1)" in said
    )
    ranks[2] = told(2)
    assert blamed(ranks).startswith("rank 1 (process 4001 on node0) stands still: is in read (io.py:3), ")


def test_where_all_wait_it_is_the_one_that_is_behind() -> None:
    assert blamed([told(0), told(1), told(2, step=6), told(3)]).startswith("rank 2 (process 4002 on node1)")


def test_a_store_that_is_gone_with_its_rank_is_told() -> None:
    said = sentence({1: told(1)}, {1: told(1)}, None, Path("logs"), reached=False)
    assert "does not answer rank 1 on node0" in said and "rank 1 is in all_reduce (c10d.py:1) (step 7)" in said


class Link:
    """Forwards a TCP connection, until it is cut: then nothing passes, and nothing is closed."""

    def __init__(self, port: int) -> None:
        self._there, self._cut = port, threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._cut.set()

    def _accept(self) -> None:
        while True:
            ours, _ = self._server.accept()
            theirs = socket.create_connection(("127.0.0.1", self._there))
            for pair in ((ours, theirs), (theirs, ours)):
                threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        while (data := source.recv(1 << 16)) and not self._cut.is_set():
            target.sendall(data)
        time.sleep(600)


def _hang_behind_a_cut_link(rank: int, world: int, logs: Path) -> None:
    watchdog._ANSWER_SECONDS = 0.5
    link = Link(int(os.environ["MASTER_PORT"]))
    store = dist.TCPStore("127.0.0.1", link.port, is_master=False)
    process_group.own_store = lambda: store
    watch = Watchdog(1, logs, lambda: "automodel resume RUN")
    watch._world_size = 2
    watch.start()
    watch.step(1)
    watch.step(2)
    time.sleep(0.3)
    link.cut()
    time.sleep(60)


def test_a_rank_that_is_cut_off_from_the_store_ends_by_its_own_limit(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure) as failure:
        launch(_hang_behind_a_cut_link, 1, tmp_path, timeout=50)
    assert_error(str(failure.value), "timeout", values=("127.0.0.1", "rank 0"))
    assert time.monotonic() - began < 40
    assert "_hang_behind_a_cut_link" in (tmp_path / "rank-0.stacks").read_text()


def test_the_collective_is_the_newest_that_has_not_ended() -> None:
    entry = {"profiling_name": "nccl:all_reduce", "input_sizes": [[4, 8], []], "process_group": ["3", "dp"]}
    record = [{**entry, "retired": True}, {**entry, "retired": False}, {**entry, "retired": True, "input_sizes": [[1]]}]
    assert last_collective(json.dumps({"entries": record}).encode()) == "nccl:all_reduce of 4x8 scalar, group 3/dp"
    assert last_collective(b'{"entries": []}') is None


def _waiting(file: str) -> bool:
    """Whether a rank counts as waiting whose innermost frame is an event's, in Python of `file`."""
    found: list[bool] = []
    names: dict[str, Any] = {"look": lambda frame: found.append(waits(frame)), "sys": sys}
    exec(compile("def synchronize(): look(sys._getframe())", file, "exec"), names)
    arriving: Any = SimpleNamespace(copied=SimpleNamespace(synchronize=names["synchronize"]), number=torch.tensor(0.0))
    wait_for_device(arriving)
    return found[0]


def test_a_rank_whose_step_waits_for_the_device_waits() -> None:
    """`synchronize` of a CUDA event is a Python function of torch around that of the driver."""
    assert _waiting(torch.cuda.streams.__file__)
    assert not _waiting(__file__)


def test_first_steps_and_long_phases_may_take_longer(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        watch = Watchdog(3, tmp_path, str)
        watch.step(1)
        assert watch.limit() == FIRST_SECONDS
        watch.step(2)
        assert watch.limit() == 3
        with watch.long("a validation"):
            assert watch.limit() == FIRST_SECONDS
        assert watch.limit() == 3
        auto = Watchdog("auto", tmp_path, str)
        auto.step(1)
        auto._step_began = time.monotonic() - 100  # a step of 100 s
        auto.step(2)
        assert 1000 <= auto.limit() < 1001
    finally:
        dist.destroy_process_group()
