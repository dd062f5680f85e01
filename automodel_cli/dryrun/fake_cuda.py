"""`torch.cuda` that pretends: one GPU of the chosen kind, streams and events whose waits are counted and timed.

Only in the process of a traced rank: nothing here is undone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from automodel_cli.distributed.expert_parallel import empty_groups
from automodel_cli.dryrun.hardware import GIB, Gpu
from automodel_cli.dryrun.simulated_clock import Clock

CUDA = torch.device("cuda", 0)


def pretend(gpu: Gpu, clock: Clock, synchronised: Callable[[str, float], None]) -> None:
    """`synchronised(what, until)` is called where the host would wait for the device."""
    numbers = itertools.count(1)

    class Event:
        device = CUDA

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
            synchronised("event.synchronize", self.time)

    class Stream:
        device, device_index, device_type, priority = CUDA, 0, 1, 0

        def __init__(self, *_: Any, number: int | None = None, **__: Any):
            self.number = self.stream_id = next(numbers) if number is None else number

        def wait_stream(self, other: Any) -> None:
            clock.wait(self.number, clock.at(other.number))

        def wait_event(self, event: Any) -> None:
            clock.wait(self.number, event.time)

        def record_event(self, event: Any = None) -> Any:
            event = event or Event()
            event.record(self)
            return event

        def synchronize(self) -> None:
            synchronised("stream.synchronize", clock.at(self.number))

        def query(self) -> bool:
            return True

        def is_capturing(self) -> bool:  # optimizers of a CUDA build ask
            return False

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Stream) and self.number == other.number

        def __hash__(self) -> int:
            return self.number

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
        synchronised("cuda.synchronize", clock.now())

    def set_stream(stream: Any) -> None:
        clock.current[-1] = stream.number

    def nothing(*_: Any, **__: Any) -> None:
        pass

    def zero(*_: Any, **__: Any) -> int:
        return 0

    def true(*_: Any, **__: Any) -> bool:
        return True

    memory = dict.fromkeys(
        ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), zero
    ) | dict.fromkeys(("empty_cache", "reset_peak_memory_stats"), nothing)  # fmt: skip
    both = {**memory, "is_available": true, "device_count": lambda: 8, "synchronize": synchronize}
    streams = {"current_stream": current_stream, "set_stream": set_stream}
    of_cuda = {
        "is_initialized": true,
        "is_bf16_supported": true,
        "is_current_stream_capturing": lambda: False,
        "current_device": zero,
        "set_device": nothing,
        "get_device_name": lambda *_: gpu.name,
        "get_device_capability": lambda *_: gpu.capability,
        "mem_get_info": lambda *_: (int(gpu.memory_gib * GIB),) * 2,
        "Stream": Stream,
        "Event": Event,
        "stream": Entered,
        "device": Device,
        "default_stream": lambda *_: Stream(number=0),
    }
    of_accelerator = {
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "current_device_index": zero,
        "set_device_index": nothing,
    }
    for module, names in ((torch.cuda, of_cuda), (torch.accelerator, of_accelerator)):
        for name, value in {**both, **streams, **names}.items():
            setattr(module, name, value)
    trial: Any = empty_groups  # a kernel that computes nothing cannot be tried
    trial.leaves_garbage = lambda *_, **__: gpu.capability[0] == 10
    tensor: Any = torch.Tensor
    tensor.record_stream = nothing
