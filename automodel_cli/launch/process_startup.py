"""Process settings before torch is imported: garbage collection, CPU threads and the CUDA allocator."""

from __future__ import annotations

import atexit
import gc
import os

from automodel_cli.launch import environment

ALLOCATOR = "expandable_segments:True"
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # torch reads either


def share_cores() -> None:
    """Let idle OpenMP threads sleep instead of spin, unless the user has set the policy.

    A spinning thread occupies the core that another thread waits for. 100 steps of a small model on 2 threads of a busy
    2-core machine took 195 s of CPU time when spinning and 10 s when sleeping. On an idle machine both are equal.
    """
    environment.set_default("OMP_WAIT_POLICY", "PASSIVE")


def grow_segments() -> None:
    """Let CUDA's allocator use expandable segments, unless the user has configured it.

    The numbers of tokens per batch and per expert change from step to step. Blocks of fixed size then leave gaps, and a
    run fails although enough memory is free.
    """
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        environment.set_own(_ALLOCATOR_VARIABLES[0], ALLOCATOR)


def allocator() -> str:
    """Return the configuration of CUDA's allocator, for the startup summary."""
    (name, value), *_ = [(n, os.environ[n]) for n in _ALLOCATOR_VARIABLES if n in os.environ] or [("", "torch's own")]
    return f"{value}   ({name})" if name else value


def disable_gc() -> None:
    """Disable garbage collection until `enable_gc`. Imports and building a model create many objects and little
    garbage.

    Without the collector, importing transformers' model code takes a quarter less time.
    """
    gc.disable()


def enable_gc() -> None:
    """Enable garbage collection before the first step, and exclude the objects that exist already."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # triton's extension module reports frozen objects at exit as leaks
    gc.enable()
