"""The harness itself: results, failures with their output, hangs as stack traces, and the price of a launch."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.dist.harness import RankFailure, launch, launch_all


def _sum_of_ranks(rank, world):
    value = torch.tensor(float(rank))
    dist.all_reduce(value)
    return value.item()


def _environment(rank, world):
    return os.environ["RANK"], os.environ["WORLD_SIZE"], dist.is_initialized(), torch.get_num_threads()


def _fail_on_one(rank, world):
    if rank == 1:
        raise ValueError("on purpose")
    dist.barrier()


def _hang_on_one(rank, world):
    if rank == 1:
        time.sleep(1000)
    dist.barrier()


def test_every_rank_returns_its_result():
    assert launch_all(_sum_of_ranks, 4) == [6.0] * 4


def test_ranks_know_their_place():
    assert launch_all(_environment, 2) == [("0", "2", True, 1), ("1", "2", True, 1)]
    assert launch_all(_environment, 2, process_group=False) == [("0", "2", False, 1), ("1", "2", False, 1)]


def test_a_failing_rank_is_reported_with_its_traceback():
    with pytest.raises(RankFailure, match="on purpose"):
        launch(_fail_on_one, 2)


def test_a_hang_becomes_a_stack_trace():
    started = time.monotonic()
    with pytest.raises(RankFailure, match="_hang_on_one"):
        launch(_hang_on_one, 2, timeout=3)
    assert time.monotonic() - started < 20


def test_later_launches_are_cheap():
    launch(_sum_of_ranks, 2)
    started = time.monotonic()
    launch(_sum_of_ranks, 2)
    assert (
        time.monotonic() - started < 5
    )  # 0.1-0.2 s on an idle machine; more would mean that a rank imports torch again
