"""Requests to the rendezvous store with a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")


class StoreTalk:
    """A thread that sends requests to `store`, one at a time.

    TCPStore waits without a limit if the host of the store is stopped or unreachable, and holds a lock meanwhile. All
    other requests on this connection would wait too.
    """

    def __init__(self, store: dist.Store):
        self._requests: SimpleQueue[tuple[Callable[[dist.Store], object], Future[object]]] = SimpleQueue()
        self._last: Future[object] | None = None
        threading.Thread(target=self._work, args=(store,), name="store-talk", daemon=True).start()

    def post(self, request: Callable[[dist.Store], object]) -> None:
        """Send a request without waiting. Skipped while an earlier request is pending."""
        if self._last is None or self._last.done():
            self._put(request)

    def ask(self, request: Callable[[dist.Store], T], seconds: float) -> T | None:
        """Return the response, or None if the store does not respond within `seconds`."""
        try:
            response = cast(T, self._put(request).result(seconds))
        except (TimeoutError, RuntimeError, ValueError):  # torch's DistError is a RuntimeError.
            return None
        return response

    def _put(self, request: Callable[[dist.Store], object]) -> Future[object]:
        response: Future[object] = Future()
        self._last = response
        self._requests.put((request, response))
        return response

    def _work(self, store: dist.Store) -> None:
        while True:
            request, response = self._requests.get()
            try:
                response.set_result(request(store))
            except Exception as error:
                response.set_exception(error)
