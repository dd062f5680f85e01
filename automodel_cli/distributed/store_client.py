"""Questions to the store of the ranks that nobody waits for longer than a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class StoreTalk:
    """A thread of its own for `store`, one question at a time.

    TCPStore waits without a limit where the host of the store is stopped or cannot be reached, and holds a lock
    meanwhile: every other question on this connection would wait too.
    """

    def __init__(self, store: dist.Store):
        self._questions: SimpleQueue[tuple[Callable[[dist.Store], Any], Future[Any]]] = SimpleQueue()
        self._last: Future[Any] | None = None
        threading.Thread(target=self._work, args=(store,), name="store-talk", daemon=True).start()

    def post(self, question: Callable[[dist.Store], object]) -> None:
        """Ask without waiting for the answer; nothing happens while an earlier question has none."""
        if self._last is None or self._last.done():
            self._put(question)

    def ask(self, question: Callable[[dist.Store], T], seconds: float) -> T | None:
        """Return the answer; None where the store is gone or does not answer within `seconds`."""
        try:
            answer: T = self._put(question).result(seconds)
        except (TimeoutError, RuntimeError, ValueError):  # torch's DistError is a RuntimeError
            return None
        return answer

    def _put(self, question: Callable[[dist.Store], Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        self._last = answer
        self._questions.put((question, answer))
        return answer

    def _work(self, store: dist.Store) -> None:
        while True:
            question, answer = self._questions.get()
            try:
                answer.set_result(question(store))
            except Exception as error:
                answer.set_exception(error)
