"""Run to completion: SIGINT, SIGTERM and SIGUSR1 ask a run to stop at the next step boundary, with a checkpoint.

SIGUSR1 is the notice that schedulers send before they end a job (`sbatch --signal`).

`install()` is called before a recipe runs. The recipe asks `requested()` once a step (its ranks must agree: the answer
rides a collective), saves, and returns `exit_code()`. A second signal ends the process at once.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGHUP: 75, signal.SIGUSR1: 75}
"""What a run that stopped on request returns: 130 for Ctrl-C, 75 (EX_TEMPFAIL) for preempted."""

_received: signal.Signals | None = None
_launched = False


def install(*, launched: bool = False) -> None:
    """Take over SIGINT, SIGTERM, SIGHUP and SIGUSR1.

    `launched` is for a rank whose launcher speaks and kills for its ranks (`launch.local`, our batch script): a
    scheduler that signals every process of a job must not look like a second request here.
    """
    global _launched
    _launched = launched
    for signum in EXIT_CODES:
        signal.signal(signum, _on_signal)


def requested() -> signal.Signals | None:
    """The signal that asked this process to stop, or None."""
    return _received


def exit_code(received: signal.Signals | int | None = None) -> int:
    """The exit code of a run that stopped because of `received` (default: what this rank got); 0 where nothing did.

    A rank that stops because another one was asked to passes that rank's signal.
    """
    found = received if received is not None else _received
    return EXIT_CODES[signal.Signals(found)] if found else 0


def reset() -> None:
    """Forget the request and give the default handlers back."""
    global _received
    _received = None
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in EXIT_CODES.keys() - {signal.SIGINT}:
        signal.signal(signum, signal.SIG_DFL)


def message(signum: int) -> str:
    """What a person who pressed Ctrl-C wants to know."""
    name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
    return f"{name}: finishing this step and saving (once more: stop at once)"


def _on_signal(signum: int, frame: FrameType | None) -> None:
    global _received
    if _received is not None:
        if _launched:
            return
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        os._exit(128 + signum)  # nothing may run any more: a handler can fire inside a collective
    _received = signal.Signals(signum)
    if not _launched:
        # os.write: the signal may have interrupted a print, and print is not reentrant.
        os.write(sys.stderr.fileno(), f"\n{message(signum)}\n".encode())
