"""Let Megatron-FSDP run on CPU ranks: the calls of `torch.cuda` that it makes, as calls that do nothing.

Streams and events order work that a CPU does in order anyway. Collectives are the exception: gloo runs them in threads
of its own, which know no streams. The stand-in is global to the process: install it in a rank that runs nothing else.
"""

from __future__ import annotations

import contextlib

import torch
from torch.distributed import distributed_c10d


class _Event:
    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args):
        pass

    def wait(self, *args):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


class _Stream:
    device = torch.device("cpu")

    def __init__(self, *args, **kwargs):
        pass

    def wait_stream(self, *args):
        pass

    def wait_event(self, *args):
        pass

    def record_event(self, event=None):
        return event or _Event()

    def synchronize(self):
        pass

    def query(self):
        return True

    def __enter__(self):
        return self

    def __exit__(self, *args):
        return False


class _Properties:
    total_memory = 2**40


def _wait_at_once(manager, work=None) -> None:
    """On CUDA a stream keeps the memory of a collective until it has run. gloo's thread would write into what the main
    thread has already given back (a segmentation fault, once in hundreds of runs), so it is waited for where it starts.
    """
    if work:
        work.wait()


def install() -> None:
    current = _Stream()
    cuda = torch.cuda
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = lambda *args, **kwargs: current
    cuda.stream = lambda stream=None: contextlib.nullcontext()
    cuda.synchronize = cuda.empty_cache = lambda *args: None
    cuda.current_device = cuda.memory_allocated = lambda *args: 0
    cuda.mem_get_info = lambda *args: (2**40, 2**40)
    cuda.get_device_properties = lambda *args: _Properties()
    make_empty = torch.empty

    def empty(*size, device=None, **kwargs):
        return make_empty(*size, device="cpu" if isinstance(device, int) else device, **kwargs)  # "cuda:0"

    torch.empty = empty
    distributed_c10d._CoalescingManager.append = _wait_at_once  # nothing is left for its `wait` to do
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda *args, **kwargs: None
