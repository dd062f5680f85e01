"""Which rank a hang is blamed on, by what the ranks told; the whole of it runs in tests/e2e/test_faults.py."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from automodel_cli.training.hang_watch import FIRST_SECONDS, HangWatch, _waits, last_collective, sentence
from automodel_cli.training.step import wait_for_device


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
    assert sentence({1: told(1)}, {1: told(1)}, None, Path("logs")).startswith(
        "rank 0 does not answer any more; rank 1"
    )


def test_the_collective_is_the_newest_that_has_not_ended() -> None:
    entry = {"profiling_name": "nccl:all_reduce", "input_sizes": [[4, 8], []], "process_group": ["3", "dp"]}
    record = [{**entry, "retired": True}, {**entry, "retired": False}, {**entry, "retired": True, "input_sizes": [[1]]}]
    assert last_collective(json.dumps({"entries": record}).encode()) == "nccl:all_reduce of 4x8 scalar, group 3/dp"
    assert last_collective(b'{"entries": []}') is None


def _waiting(file: str) -> bool:
    """Whether a rank counts as waiting whose innermost frame is an event's, in Python of `file`."""
    found: list[bool] = []
    names: dict[str, Any] = {"look": lambda frame: found.append(_waits(frame)), "sys": sys}
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
        watch = HangWatch(3, tmp_path, str)
        watch.step(1)
        assert watch.limit() == FIRST_SECONDS
        watch.step(2)
        assert watch.limit() == 3
        with watch.long("a validation"):
            assert watch.limit() == FIRST_SECONDS
        assert watch.limit() == 3
        auto = HangWatch("auto", tmp_path, str)
        auto.step(1)
        auto._step_began = time.monotonic() - 100  # a step of 100 s
        auto.step(2)
        assert 1000 <= auto.limit() < 1001
    finally:
        dist.destroy_process_group()
