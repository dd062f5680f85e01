"""Limit the clean-up time after a failure, because ranks may wait for each other forever."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from automodel_cli.config.errors import ConfigError
from automodel_cli.launch import rank_process, safe_output

TELL_SECONDS = 20.0
LEAVE_SECONDS = 600.0
"""Time for a background checkpoint to complete."""


@contextmanager
def bounded() -> Iterator[Callable[[BaseException], None]]:
    """Yield a function that accepts the error with which a clean-up begins.

    The error is printed if the clean-up takes longer than `TELL_SECONDS`. The process ends after `LEAVE_SECONDS`.
    """
    over = threading.Event()

    def failed(error: BaseException) -> None:
        threading.Thread(target=_watch, args=(error, over), name="clean-up", daemon=True).start()

    try:
        yield failed
    finally:
        over.set()


def _watch(error: BaseException, over: threading.Event) -> None:
    if over.wait(TELL_SECONDS):
        return
    if isinstance(error, ConfigError):
        text = f"{type(error).__name__}: {error}\n"
    else:
        text = "".join(traceback.format_exception(error))
    text += f"rank {os.environ.get('RANK', '0')} cleans up after this error; it ends within {LEAVE_SECONDS:.0f} s\n"
    safe_output.urgent(text)
    if not over.wait(LEAVE_SECONDS):
        code = rank_process.report_exit_code(getattr(error, "exit_code", 1))
        safe_output.flush()
        os._exit(code)
