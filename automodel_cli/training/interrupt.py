"""Stop at a step boundary: the first SIGINT or SIGTERM asks, the second insists."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupt:
    """While active, SIGINT and SIGTERM set `requested`; a second signal raises KeyboardInterrupt.

    Signals reach the ranks at different moments, so the loop must agree on the flag (a maximum over ranks, along with
    the loss) before it acts on it; this class only knows its own process. Outside the main thread, where Python
    delivers no signals, it stays inactive and `requested` False.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self.signal_name is not None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt(signal.Signals(number).name)
        self.signal_name = signal.Signals(number).name
