"""End Python code that does not end: a chat template is a program, and its loops nest."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator

from automodel_cli.config.errors import DataError

_LOOK_SECONDS = 0.5
_lock = threading.Lock()
_deadlines: dict[int, float] = {}
"""Thread -> time at which its code must have ended. One thread watches all deadlines, because one timer per rendering
would take a quarter of the rendering time."""
_watches = False


class _Expired(BaseException):
    """Not an Exception, so that handlers in the interrupted code do not catch it."""


@contextlib.contextmanager
def time_limit(seconds: float, what: str, fix: str) -> Iterator[None]:
    """Raise DataError in this thread after `seconds`. Interrupts Python code, but no call into C.

    Has no effect inside another limit.
    """
    thread = threading.get_ident()
    if thread in _deadlines:
        yield
        return
    _watch()
    _deadlines[thread] = time.monotonic() + seconds
    try:
        yield
    except _Expired:
        raise DataError(f"{what} did not finish within {seconds:g} s", code="timeout", fix=fix) from None
    finally:
        with _lock:
            if _deadlines.pop(thread, None) is None:
                _interrupt(thread, None)  # it came too late


def _watch() -> None:
    global _watches
    with _lock:
        if _watches:
            return
        _watches = True
    threading.Thread(target=_run, name="time-limit", daemon=True).start()


def _run() -> None:
    while True:
        time.sleep(_LOOK_SECONDS)
        now = time.monotonic()
        for thread, deadline in list(_deadlines.items()):
            with _lock:
                if now > deadline and _deadlines.get(thread) == deadline:
                    del _deadlines[thread]
                    _interrupt(thread, _Expired)


def _interrupt(thread: int, error: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )


def _forget() -> None:
    """A forked process has none of the threads."""
    global _watches, _lock
    _watches, _lock = False, threading.Lock()
    _deadlines.clear()


os.register_at_fork(after_in_child=_forget)
