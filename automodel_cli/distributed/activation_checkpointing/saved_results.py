"""What a recomputed layer keeps of its first run: what would cost a wait or an exchange between ranks to make again.

`recomputed()` makes the two contexts of one call of a checkpointed layer. In the first `keep` calls and remembers, in
the second it hands out what it remembers, in the same order, however often backward runs the layer again (zero-bubble
schedules do so twice). Outside of both `keep` only calls. Nothing is intercepted, so what is not kept costs nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum
from typing import Any, TypeVar
from weakref import WeakSet

from torch import nn

T = TypeVar("T")


class SaveLevel(IntEnum):
    """How much; each has those before it."""

    ROUTES = 1
    """Small integers: which token goes where, for which the host waits."""
    EXCHANGES = 2
    """What came from other ranks, and what was made of it for them."""
    PRODUCTS = 3
    """Cheap to make next to an exchange."""


class _Current(threading.local):
    """Backward runs layers again on threads of its own."""

    call: _Call | None = None


class _Call:
    """One call of one layer; freed with the graph that would run it again."""

    def __init__(self, most: SaveLevel):
        self.most = most
        self.results: list[Any] = []
        self.next: int | None = None  # the result to hand out, or None while they are made

    def keep(self, make: Callable[[], Any]) -> Any:
        if self.next is None:
            _current.call = None  # what is made for this result is not kept beside it
            try:
                self.results.append(make())
            finally:
                _current.call = self
            return self.results[-1]
        self.next += 1
        return self.results[self.next - 1]


_current = _Current()
_keeping: WeakSet[nn.Module] = WeakSet()


def save_or_replay(make: Callable[[], T], what: SaveLevel = SaveLevel.EXCHANGES) -> T:
    """What `make` returns, now or in the run of this layer that is being repeated. It must not be changed in place."""
    call = _current.call
    if call is None or what > call.most:
        return make()
    result: T = call.keep(make)
    return result


def is_keeping(what: SaveLevel = SaveLevel.EXCHANGES) -> bool:
    """Whether `keep` remembers this."""
    return _current.call is not None and what <= _current.call.most


def is_repeating(what: SaveLevel = SaveLevel.EXCHANGES) -> bool:
    """Whether `keep` hands out what it remembers of this, and makes nothing."""
    call = _current.call
    return call is not None and what <= call.most and call.next is not None


def recomputed(most: SaveLevel) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of a layer's first run and of its repetitions, as `checkpoint(context_fn=...)` wants them."""
    call = _Call(most)
    return _within(call, None), _Repeatedly(call)


class _Repeatedly(AbstractContextManager[None]):
    """Enters anew as often as backward asks."""

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
    outer, _current.call, call.next = _current.call, call, start
    try:
        yield
    finally:
        _current.call = outer


def register_saver(module: nn.Module) -> None:
    """Say that `module` calls `keep`."""
    _keeping.add(module)


def keeps(layer: nn.Module) -> bool:
    """Whether something in `layer` calls `keep`."""
    return any(module in _keeping for module in layer.modules())
