"""Threads that use the GPU of the thread that starts them. Torch-free at import.

The current CUDA device is a property of a thread, and a new thread has device 0. Every rank would create a context on
the first GPU of its machine, a few hundred MiB each, and kernels would run there.
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
    """Return `call` for another thread, where it first selects the device of this thread. No effect without CUDA."""
    device = _current()
    if device is None:
        return call

    @functools.wraps(call)
    def selected(*args: P.args, **kwargs: P.kwargs) -> T:
        _torch().cuda.set_device(device)
        return call(*args, **kwargs)

    return selected


def threads_on_this_device(number: int | None, name: str = "") -> ThreadPoolExecutor:
    """Return a pool whose threads select the device of this thread when they start."""
    return ThreadPoolExecutor(number, thread_name_prefix=name, initializer=on_this_device(_nothing))


def _current() -> int | None:
    torch = _torch()
    if torch is None or not torch.cuda.is_initialized():  # The query would initialize CUDA in a run on the CPU.
        return None
    device: int = torch.cuda.current_device()
    return device


def _torch() -> Any:
    return sys.modules.get("torch")


def _nothing() -> None:
    """Initializer of a thread."""
