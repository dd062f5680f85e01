"""What makes a process quick to start and a polite neighbour; called before torch is imported."""

from __future__ import annotations

import gc
import os


def share_cores() -> None:
    """Let idle OpenMP threads sleep instead of spin, unless the user has chosen.

    A spinning thread takes the core that the other one waits for: 100 steps of a small model on 2 threads of a busy
    2-core machine took 195 s of CPU spinning and 10 s sleeping. On a quiet machine the two are alike.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def hold_garbage() -> None:
    """Until `collect_again`: imports and building a model make many objects and little garbage.

    Without the collector, importing the library's model code takes a quarter less time.
    """
    gc.disable()


def collect_again() -> None:
    """Before the first step: collect from now on, and leave out what is there already and will stay."""
    gc.freeze()
    gc.enable()
