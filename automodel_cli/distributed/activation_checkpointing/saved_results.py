"""Results that activation checkpointing saves instead of recomputing: those that need host synchronization or
communication.

`recomputed()` returns the two contexts of one call of a checkpointed layer. In the first one, `save_or_replay` computes
and saves a result. In the second one, it returns the saved results in the same order, for each recomputation.
Zero-bubble schedules recompute a layer twice. Outside both contexts it only computes. No operators are intercepted, so
other results have no overhead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum
from typing import Any, TypeVar, cast
from weakref import WeakSet

from torch import nn

T = TypeVar("T")


class SaveLevel(IntEnum):
    """Amount of saved results. Each level includes the previous ones."""

    ROUTES = 1
    """Routes of tokens: small integers that need a host synchronization."""
    EXCHANGES = 2
    """Rows received from other ranks, and their results."""
    PRODUCTS = 3
    """First GEMMs of experts, which are cheap compared with communication."""


class _Current(threading.local):
    """Thread-local, because backward recomputes layers in other threads."""

    call: _Call | None = None


# Example with level EXCHANGES: the first run of experts makes routes, received rows and sums of results, so `results`
# has these three. The first GEMM has the level PRODUCTS and is not saved. In recomputation `next` is 0: the calls
# return routes, then rows, the GEMM runs, and the last call returns the sums.
class _Call:
    """One call of one layer. Freed together with its graph."""

    def __init__(self, max_level: SaveLevel):
        self.max_level = max_level
        self.results: list[object] = []
        self.next: int | None = None  # Index of the next result to return, or None while results are computed.

    def keep(self, make: Callable[[], T]) -> T:
        if self.next is None:
            _current.call = None  # Nested results are not saved.
            try:
                self.results.append(make())
            finally:
                _current.call = self
            return cast(T, self.results[-1])
        self.next += 1
        return cast(T, self.results[self.next - 1])


_current = _Current()
_keeping: WeakSet[nn.Module] = WeakSet()


def save_or_replay(make: Callable[[], T], level: SaveLevel = SaveLevel.EXCHANGES) -> T:
    """Return the result of `make`, or the saved result during recomputation.

    The result must not be changed in place.
    """
    call = _current.call
    if call is None or level > call.max_level:
        return make()
    return call.keep(make)


def is_keeping(level: SaveLevel = SaveLevel.EXCHANGES) -> bool:
    """Return whether `save_or_replay` saves or replays results of this level."""
    return _current.call is not None and level <= _current.call.max_level


def is_repeating(level: SaveLevel = SaveLevel.EXCHANGES) -> bool:
    """Return whether `save_or_replay` returns saved results of this level."""
    call = _current.call
    return call is not None and level <= call.max_level and call.next is not None


def recomputed(max_level: SaveLevel) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the first run and the recomputations of a layer, for `checkpoint(context_fn=...)`."""
    call = _Call(max_level)
    return _within(call, None), _Repeatedly(call)


class _Repeatedly(AbstractContextManager[None]):
    """Context that can be entered several times."""

    def __init__(self, call: _Call):
        self._call = call
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(_within(self._call, 0))
        self._entered[-1].__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)


@contextmanager
def _within(call: _Call, start: int | None) -> Iterator[None]:
    # `next` restarts at 0, so a second recomputation gets the same results.
    outer, _current.call, call.next = _current.call, call, start
    try:
        yield
    finally:
        _current.call = outer


def register_saver(module: nn.Module) -> None:
    """Register that `module` calls `save_or_replay`."""
    _keeping.add(module)


def keeps(layer: nn.Module) -> bool:
    """Return whether a module in `layer` calls `save_or_replay`."""
    return any(module in _keeping for module in layer.modules())
