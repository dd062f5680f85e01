"""Signal handling: SIGINT, SIGTERM and SIGUSR1 stop a run after the current step, with a checkpoint.

SIGUSR1 is the notice that schedulers send before they end a job (`sbatch --signal`).

`install_handlers()` is called before a recipe runs. The recipe checks `requested()` once per step. Its ranks agree
through a collective of the step. Then it saves and returns `exit_code()`. A second signal ends the process immediately.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from automodel_cli.config.fix_syntax import word
from automodel_cli.launch import safe_output

Handler = Callable[[int, FrameType | None], object] | int | None
_CHECKPOINT = re.compile(r"step-(\d{6,})")
EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 75, signal.SIGHUP: 75, signal.SIGUSR1: 75}
"""Exit codes of a run that stopped on request: 130 for Ctrl-C, 75 (EX_TEMPFAIL) for preemption."""

_received: signal.Signals | None = None
_before: dict[signal.Signals, Any] = {}
_launched = False
_run_folder: Path | None = None


def install_handlers(*, launched: bool = False) -> None:
    """Install handlers for SIGINT, SIGTERM, SIGHUP and SIGUSR1. Ignored signals, as SIGHUP under `nohup`, stay ignored.

    `launched`: the launcher prints and kills for its ranks (`launch.local`, the batch script). A scheduler that signals
    every process of a job then does not count as a second request.
    """
    global _launched
    _launched = launched
    for signum, before in handle(_on_signal).items():
        _before.setdefault(signum, before)


def handle(handler: Handler) -> dict[signal.Signals, Handler]:
    """Set a handler for each stop signal that is not ignored. Returns the previous handlers."""
    heard = [s for s in EXIT_CODES if signal.getsignal(s) is not signal.SIG_IGN]
    return {s: signal.signal(s, handler) for s in heard}


def escalates(signum: int, received: signal.Signals) -> bool:
    """Return whether `signum` after `received` ends the run immediately.

    A closed terminal sends SIGHUP twice (the shell and the kernel), and the end of a session sends SIGTERM and SIGHUP.
    """
    return signal.SIGHUP not in (signum, received)


def requested() -> signal.Signals | None:
    """Return the signal that requested a stop, or None."""
    return _received


def exit_code(received: signal.Signals | int | None = None) -> int:
    """Return the exit code of a run that stopped because of `received`, or 0 without a signal.

    The default is the signal of this rank. A rank that stops because of another rank passes the signal of that rank.
    """
    signal_name = received if received is not None else _received
    return EXIT_CODES[signal.Signals(signal_name)] if signal_name else 0


def reset() -> None:
    """Clear the request and restore the handlers that `install_handlers` replaced."""
    global _received, _run_folder
    _received = _run_folder = None
    for signum, handler in _before.items():
        signal.signal(signum, handler)
    _before.clear()


def note_run_folder(folder: Path) -> None:
    """Set the run folder, which the message after a second signal names."""
    global _run_folder
    _run_folder = folder


def resume_hint(run_folder: Path | None) -> str:
    """Return the command that resumes an interrupted run, and its checkpoint."""
    if run_folder is None:
        return "the same command again: nothing was trained yet"
    return f"automodel resume {word(run_folder)}   ({begins_at(run_folder)})"


def begins_at(run_folder: Path) -> str:
    """Return the checkpoint from which an interrupted run resumes, as text."""
    found = [_CHECKPOINT.fullmatch(path.name) for path in run_folder.glob("checkpoints/step-*")]
    newest = max((match for match in found if match is not None), key=lambda match: int(match[1]), default=None)
    return f"resumes from {newest[0]}" if newest else "starts over: no checkpoint was written yet"


def exit_message(run_folder: Path | None) -> str:
    """Return the message after an immediate stop. A checkpoint is renamed to its final name last, so it is complete."""
    return f"stopped immediately; saved checkpoints are complete, later steps are lost\n  {resume_hint(run_folder)}"


def message(signum: int) -> str:
    """Return the message after the first signal."""
    name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
    return f"{name}: finishing this step and saving a checkpoint. A second signal stops immediately."


def _on_signal(signum: int, frame: FrameType | None) -> None:
    global _received
    first = _received is None
    if _received is not None and escalates(signum, _received):
        if _launched:
            return
        safe_output.urgent(f"\n{exit_message(_run_folder)}\n")
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        os._exit(128 + signum)  # no other code may run: a handler can fire inside a collective
    if first or signum != signal.SIGHUP:  # after SIGHUP, the first signal that was sent on purpose
        _received = signal.Signals(signum)
    if first and not _launched:
        safe_output.urgent(f"\n{message(signum)}\n")
