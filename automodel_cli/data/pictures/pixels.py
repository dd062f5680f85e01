"""Pixels of microbatches: read by threads shortly before they are needed, and dropped when they have been used.

A batch holds the promise of its pixels (`LazyInputs`). The model fetches them when the microbatch runs. Threads read
the next ones meanwhile, as far as the memory limit permits. Ranks that fetch nothing (later pipeline stages) read
nothing.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any

from torch import Tensor

Read = Callable[[], dict[str, Tensor]]
_MOST_THREADS = 8


class LazyInputs(Mapping[str, Tensor]):
    """Outputs of the image processor for the pictures of one microbatch.

    Nothing is kept: after use, the next access reads the files again. Use `items()` for all of them at once.
    """

    def __init__(self, queue: PixelQueue, read: Read):
        self.queue, self.read = queue, read
        self.future: Future[dict[str, Tensor]] | None = None

    def items(self) -> Any:
        return self.queue.fetch(self).items()

    def __getitem__(self, name: str) -> Tensor:
        return self.queue.fetch(self)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.queue.fetch(self))

    def __len__(self) -> int:
        return len(self.queue.fetch(self))


class PixelQueue:
    """Reads the inputs of microbatches ahead, in the order in which they were added."""

    def __init__(self, num_threads: int, max_bytes: float):
        """`max_bytes`: largest memory of inputs that wait for their use. The next one is read ahead in any case."""
        self.max_bytes = max_bytes
        self.peak_bytes = 0
        """Largest memory of waiting inputs so far, for tests and reports."""
        self._threads = ThreadPoolExecutor(num_threads, "pixels")
        self._lock = Lock()
        self._waiting: deque[weakref.ref[LazyInputs]] = deque()
        self._in_use = False
        self._largest = 0

    def add(self, read: Read) -> LazyInputs:
        """Return inputs that `read` will make. Reading ahead begins with the first use of any inputs of the queue."""
        inputs = LazyInputs(self, read)
        with self._lock:
            self._waiting.append(weakref.ref(inputs))
            if self._in_use:
                self._read_ahead()
        return inputs

    def fetch(self, inputs: LazyInputs) -> dict[str, Tensor]:
        """Return the inputs, and start to read the following ones. Raises what reading raised."""
        with self._lock:
            self._in_use = True
            future, inputs.future = inputs.future or self._started(inputs), None
            if any(ref() is inputs for ref in self._waiting):
                while self._waiting.popleft()() is not inputs:  # those before it are read when they are used
                    pass
            self._read_ahead()
        found = future.result()
        with self._lock:
            self._largest = max(self._largest, num_bytes(found))
            self._read_ahead()
        return found

    def _started(self, inputs: LazyInputs) -> Future[dict[str, Tensor]]:
        return self._threads.submit(inputs.read)

    def _read_ahead(self) -> None:
        """Start to read waiting inputs, in order, while their memory is below the limit. Call it with the lock."""
        waiting = [inputs for ref in self._waiting if (inputs := ref()) is not None]
        self._waiting = deque(map(weakref.ref, waiting))
        held = 0
        for place, inputs in enumerate(waiting):
            held += self._size(inputs.future)
            if place and (held > self.max_bytes or not self._largest):
                break
            self.peak_bytes = max(self.peak_bytes, held)
            inputs.future = inputs.future or self._started(inputs)

    def _size(self, future: Future[dict[str, Tensor]] | None) -> int:
        """Return the memory of inputs. Until they are read, that of the largest inputs so far."""
        if future is None or not future.done() or future.exception() is not None:
            return self._largest
        return num_bytes(future.result())


def num_threads() -> int:
    """Return the number of threads that read pictures on this rank: its share of the cores, at most 8."""
    return min(_MOST_THREADS, max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


def num_bytes(inputs: Mapping[str, Tensor]) -> int:
    """Return the memory of tensors."""
    return sum(value.numel() * value.element_size() for value in inputs.values())
