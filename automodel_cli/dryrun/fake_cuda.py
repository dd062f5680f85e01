"""`torch.cuda` that pretends: one GPU of the chosen kind, streams and events whose waits are counted and timed.

Only in the process of a traced rank: nothing here is undone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from automodel_cli.dryrun.clock import Clock
from automodel_cli.dryrun.gpus import Gpu

CUDA = torch.device("cuda", 0)


def pretend(gpu: Gpu, clock: Clock, synchronised: Callable[[str], None]) -> None:
    """`synchronised(what)` is called where the host would wait for the device."""
    numbers = itertools.count(1)

    class Event:
        def __init__(self, *_: Any, **__: Any):
            self.time = 0.0

        def record(self, stream: Any = None) -> None:
            self.time = clock.at(clock.stream if stream is None else stream.number)

        def wait(self, stream: Any = None) -> None:
            clock.wait(clock.stream if stream is None else stream.number, self.time)

        def query(self) -> bool:
            return True

        def elapsed_time(self, other: Any) -> float:
            return (other.time - self.time) * 1e3

        def synchronize(self) -> None:
            clock.host_waits(self.time)
            synchronised("event.synchronize")

    class Stream:
        device, device_index = CUDA, 0

        def __init__(self, *_: Any, number: int | None = None, **__: Any):
            self.number = next(numbers) if number is None else number

        def wait_stream(self, other: Any) -> None:
            clock.wait(self.number, clock.at(other.number))

        def wait_event(self, event: Any) -> None:
            clock.wait(self.number, event.time)

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record(self)
            return event

        def synchronize(self) -> None:
            clock.host_waits(clock.at(self.number))
            synchronised("stream.synchronize")

        def query(self) -> bool:
            return True

        def __enter__(self) -> Any:
            clock.current.append(self.number)
            return self

        def __exit__(self, *_: Any) -> None:
            clock.current.pop()

    class Entered:
        """`torch.cuda.stream(s)`; None leaves the stream as it is."""

        def __init__(self, stream: Any = None):
            self.number = clock.stream if stream is None else stream.number

        def __enter__(self) -> None:
            clock.current.append(self.number)

        def __exit__(self, *_: Any) -> None:
            clock.current.pop()

    class Device:
        def __init__(self, *_: Any):
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: Any) -> None:
            pass

    def current_stream(*_: Any) -> Any:
        return Stream(number=clock.stream)

    def synchronize(*_: Any) -> None:
        clock.host_waits(clock.now())
        synchronised("cuda.synchronize")

    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "set_device": lambda _: None,
        "get_device_name": lambda *_: gpu.name,
        "get_device_capability": lambda *_: gpu.capability,
        "max_memory_reserved": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "Stream": Stream,
        "Event": Event,
        "stream": Entered,
        "device": Device,
        "current_stream": current_stream,
        "default_stream": lambda *_: Stream(number=0),
        "synchronize": synchronize,
    }
    cuda: Any = torch.cuda
    for name, value in replaced.items():
        setattr(cuda, name, value)
    others: Any = torch
    others.accelerator.current_stream = current_stream
    others.Tensor.record_stream = lambda self, stream: None
