"""Process settings before torch is imported: garbage collection, CPU threads and the CUDA allocator."""

from __future__ import annotations

import atexit
import gc
import os

from automodel_cli.launch import environment

ALLOCATOR = "expandable_segments:True"
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch reads either


def share_cores() -> None:
    """Let idle OpenMP threads sleep instead of spin, unless the user has chosen.

    A spinning thread takes the core that the other one waits for: 100 steps of a small model on 2 threads of a busy
    2-core machine took 195 s of CPU spinning and 10 s sleeping. On a quiet machine the two are alike.
    """
    environment.set_default("OMP_WAIT_POLICY", "PASSIVE")


def grow_segments() -> None:
    """Let CUDA's allocator grow its blocks, unless the user has chosen how it works.

    Rows and the tokens of an expert differ in number from step to step; blocks of fixed size then leave gaps that
    nothing fits into, and a run stops for want of memory that it has.
    """
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        environment.set_own(_ALLOCATOR_VARIABLES[0], ALLOCATOR)


def allocator() -> str:
    """How CUDA's allocator was told to work, as a line of a run's header."""
    (name, value), *_ = [(n, os.environ[n]) for n in _ALLOCATOR_VARIABLES if n in os.environ] or [("", "torch's own")]
    return f"{value}   ({name})" if name else value


def disable_gc() -> None:
    """Until `collect_again`: imports and building a model make many objects and little garbage.

    Without the collector, importing the library's model code takes a quarter less time.
    """
    gc.disable()


def enable_gc() -> None:
    """Before the first step: collect from now on, and leave out what is there already and will stay."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # triton's extension module counts what is frozen at exit as leaks, and prints them
    gc.enable()
