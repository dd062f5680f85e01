"""Threads that stay on the GPU of the thread that starts them. Imports no torch.

The current CUDA device belongs to a thread, and a new thread has device 0. There, every rank would make a context on
the first GPU of its machine, a few hundred MiB each, and kernels that follow the current device would run on it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def on_this_device(call: Callable[P, T]) -> Callable[P, T]:
    """`call` for another thread, which selects the device of this one first. A process without CUDA changes nothing."""
    device = _current()
    if device is None:
        return call

    @functools.wraps(call)
    def selected(*args: P.args, **kwargs: P.kwargs) -> T:
        _torch().cuda.set_device(device)
        return call(*args, **kwargs)

    return selected


def threads_on_this_device(number: int | None, name: str = "") -> ThreadPoolExecutor:
    """A pool whose threads select the device of this one as they start."""
    return ThreadPoolExecutor(number, thread_name_prefix=name, initializer=on_this_device(_nothing))


def _current() -> int | None:
    torch = _torch()
    if torch is None or not torch.cuda.is_initialized():  # to ask would initialize CUDA in a run on the CPU
        return None
    device: int = torch.cuda.current_device()
    return device


def _torch() -> Any:
    return sys.modules.get("torch")


def _nothing() -> None:
    """A thread that starts has nothing else to do."""
