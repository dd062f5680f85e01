"""Measure the share of time in which a server has no requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class OpenRequests:
    """Requests in flight at a server, counted over all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._number = 0
        self._began = self._idle_since = time.monotonic()
        self._idle_seconds = 0.0

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """A request is open inside."""
        with self._lock:
            if not self._number:
                self._idle_seconds += time.monotonic() - self._idle_since
            self._number += 1
        try:
            yield
        finally:
            with self._lock:
                self._number -= 1
                self._idle_since = time.monotonic()

    def idle_fraction(self) -> float:
        """The share of the time since the last call, or since there is this, in which none was open."""
        with self._lock:
            now = time.monotonic()
            if not self._number:
                self._idle_seconds += now - self._idle_since
                self._idle_since = now
            share = self._idle_seconds / max(now - self._began, 1e-9)
            self._began, self._idle_seconds = now, 0.0
            return share
