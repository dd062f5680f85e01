"""Fake `torch.cuda`: one GPU of the chosen kind, with streams and events whose waits are counted and timed.

Only in the process of a traced rank: nothing here is undone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from automodel_cli.distributed import empty_groups
from automodel_cli.distributed.typed_torch import set_attributes
from automodel_cli.planning.hardware import GIB, Gpu
from automodel_cli.planning.simulated_clock import Clock

CUDA = torch.device("cuda", 0)


_numbers = itertools.count(1)


@dataclass(frozen=True)
class _Host:
    """`waits(what, until)` is called where the host would wait for the device."""

    waits: Callable[[str, float], None]


class _Timed:
    """What waits for the device, or lets others wait. `pretend` sets both attributes, for the whole process."""

    clock: ClassVar[Clock]
    host: ClassVar[_Host]


class _Event(_Timed):
    device = CUDA

    def __init__(self, *_: object, **__: object):
        self.time = 0.0

    def record(self, stream: _Stream | None = None) -> None:
        self.time = self.clock.at(self.clock.stream if stream is None else stream.number)

    def wait(self, stream: _Stream | None = None) -> None:
        self.clock.wait(self.clock.stream if stream is None else stream.number, self.time)

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return (other.time - self.time) * 1e3

    def synchronize(self) -> None:
        self.host.waits("event.synchronize", self.time)


class _Stream(_Timed):
    device, device_index, device_type, priority = CUDA, 0, 1, 0

    def __init__(self, *_: object, number: int | None = None, **__: object):
        self.number = self.stream_id = next(_numbers) if number is None else number

    def wait_stream(self, other: _Stream) -> None:
        self.clock.wait(self.number, self.clock.at(other.number))

    def wait_event(self, event: _Event) -> None:
        self.clock.wait(self.number, event.time)

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.host.waits("stream.synchronize", self.clock.at(self.number))

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:  # optimizers of a CUDA build ask
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream) and self.number == other.number

    def __hash__(self) -> int:
        return self.number

    def __enter__(self) -> _Stream:
        self.clock.current.append(self.number)
        return self

    def __exit__(self, *_: object) -> None:
        self.clock.current.pop()


class _Entered(_Timed):
    """`torch.cuda.stream(s)`; None leaves the stream as it is."""

    def __init__(self, stream: _Stream | None = None):
        self.number = self.clock.stream if stream is None else stream.number

    def __enter__(self) -> None:
        self.clock.current.append(self.number)

    def __exit__(self, *_: object) -> None:
        self.clock.current.pop()


class _Device:
    def __init__(self, *_: object):
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def _nothing(*_: object, **__: object) -> None:
    pass


def _zero(*_: object, **__: object) -> int:
    return 0


def _true(*_: object, **__: object) -> bool:
    return True


def pretend(gpu: Gpu, clock: Clock, synchronised: Callable[[str, float], None]) -> None:
    """`synchronised(what, until)` is called where the host would wait for the device."""
    _Timed.clock, _Timed.host = clock, _Host(synchronised)

    def set_stream(stream: _Stream) -> None:
        clock.current[-1] = stream.number

    memory = dict.fromkeys(
        ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"), _zero
    ) | dict.fromkeys(("empty_cache", "reset_peak_memory_stats"), _nothing)  # fmt: skip
    both = {
        **memory,
        "is_available": _true,
        "device_count": lambda: 8,
        "synchronize": lambda *_: synchronised("cuda.synchronize", clock.now()),
    }
    streams = {"current_stream": lambda *_: _Stream(number=clock.stream), "set_stream": set_stream}
    of_cuda = {
        "is_initialized": _true,
        "is_bf16_supported": _true,
        "is_current_stream_capturing": lambda: False,
        "current_device": _zero,
        "set_device": _nothing,
        "get_device_name": lambda *_: gpu.name,
        "get_device_capability": lambda *_: gpu.capability,
        "mem_get_info": lambda *_: (int(gpu.memory_gib * GIB),) * 2,
        "Stream": _Stream,
        "Event": _Event,
        "stream": _Entered,
        "device": _Device,
        "default_stream": lambda *_: _Stream(number=0),
    }
    of_accelerator = {
        "current_accelerator": lambda *_, **__: torch.device("cuda"),
        "current_device_index": _zero,
        "set_device_index": _nothing,
    }
    for module, names in ((torch.cuda, of_cuda), (torch.accelerator, of_accelerator)):
        for name, value in {**both, **streams, **names}.items():
            setattr(module, name, value)
    # A kernel that computes nothing cannot be tried.
    set_attributes(empty_groups, leaves_garbage=lambda *_, **__: gpu.capability[0] == 10)
    set_attributes(torch.Tensor, record_stream=_nothing)
