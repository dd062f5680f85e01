"""Event loop in a background thread, and daemon threads for blocking calls. Torch-free."""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from automodel_cli.distributed.device_threads import on_this_device

T = TypeVar("T")


class LoopThread:
    """Run coroutines until `close`. Starts with the first one. Resources of coroutines stay open until then."""

    def __init__(self, name: str):
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` in the background. Any thread may call this method."""
        with self._starting:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=on_this_device(self._loop.run_forever), name=self._name, daemon=True
                )
                self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for `work` and return its result or raise its exception."""
        return self.begin(work).result()

    def close(self) -> None:
        """Cancel running coroutines and stop the loop."""
        if self._loop is None or self._thread is None:
            return
        self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._loop = self._thread = None


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def in_thread(call: Callable[[], T]) -> T:
    """Return the result of `call`, or raise its exception, in a thread that does not delay the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        if not future.done():  # cancelled in the meantime
            outcome()

    def target() -> None:
        try:
            outcome = functools.partial(future.set_result, call())
        except BaseException as error:  # every exception belongs to the caller
            outcome = functools.partial(future.set_exception, error)
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=on_this_device(target), name="environment step", daemon=True).start()
    return await future
