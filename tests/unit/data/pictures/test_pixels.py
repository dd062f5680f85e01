"""Reading ahead of pixels: order, memory limit, errors, and nothing read for batches that are never run."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from automodel_cli.data.pictures.pixels import PixelQueue, num_bytes

SIZE = 1000


class Files:
    """Inputs of `SIZE` bytes for each number, with a record of what was read."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def of(self, number: int) -> Callable[[], dict[str, Tensor]]:
        def read() -> dict[str, Tensor]:
            self.gate.wait(10)
            self.read.append(number)
            return {"pixel_values": torch.full((SIZE,), number, dtype=torch.uint8)}

        return read

    def until(self, count: int) -> list[int]:
        """What was read when there are `count` reads and a moment has passed."""
        end = time.monotonic() + 10
        while len(self.read) < count and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(0.05)
        return self.read


def test_threads_read_the_next_batches_up_to_the_limit_and_nothing_before_the_first_use():
    files, queue = Files(), PixelQueue(1, max_bytes=2.5 * SIZE)
    batches = [queue.add(files.of(number)) for number in range(8)]
    assert files.until(0) == []
    assert int(dict(batches[0].items())["pixel_values"][0]) == 0
    assert files.until(3) == [0, 1, 2], "two of the following fit into the limit"
    for number in range(1, 8):
        assert int(dict(batches[number].items())["pixel_values"][0]) == number
    assert files.read == list(range(8)), "each once"
    assert queue.peak_bytes <= 2.5 * SIZE


def test_the_next_batch_is_read_although_it_alone_exceeds_the_limit():
    files, queue = Files(), PixelQueue(2, max_bytes=0)
    batches = [queue.add(files.of(number)) for number in range(4)]
    batches[0].items()
    assert files.until(2) == [0, 1]


def test_batches_of_the_next_step_are_read_while_this_step_runs():
    files, queue = Files(), PixelQueue(1, max_bytes=10 * SIZE)
    queue.add(files.of(0)).items()
    following = queue.add(files.of(1))
    assert files.until(2) == [0, 1]
    assert int(following["pixel_values"][0]) == 1


def test_inputs_are_not_kept_and_are_read_again_for_a_second_use():
    files, queue = Files(), PixelQueue(1, max_bytes=10 * SIZE)
    inputs = queue.add(files.of(3))
    first, second = (dict(inputs.items())["pixel_values"] for _ in range(2))
    assert files.read == [3, 3] and torch.equal(first, second)


def test_batches_that_nobody_runs_are_neither_read_nor_kept():
    files, queue = Files(), PixelQueue(1, max_bytes=10 * SIZE)
    left_out = queue.add(files.of(0))
    used = queue.add(files.of(1))
    dropped = queue.add(files.of(2))
    del dropped
    gc.collect()
    last = queue.add(files.of(4))
    used.items()
    assert files.until(2) == [1, 4]
    assert int(left_out["pixel_values"][0]) == 0, "later use still reads"
    assert int(last["pixel_values"][0]) == 4


def test_an_error_reaches_who_uses_the_inputs():
    def broken() -> dict[str, Tensor]:
        raise OSError("gone")

    files, queue = Files(), PixelQueue(1, max_bytes=10 * SIZE)
    first, second, third = queue.add(files.of(0)), queue.add(broken), queue.add(files.of(2))
    first.items()
    with pytest.raises(OSError, match="gone"):
        second.items()
    assert int(third["pixel_values"][0]) == 2
    assert num_bytes({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int64)}) == 28
