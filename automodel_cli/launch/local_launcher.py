"""Launcher of the ranks of one host, based on torch elastic. Returns the exit code of rank 0."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from automodel_cli.launch import environment, rank_process, safe_output, signals
from automodel_cli.launch.attempt import FAILED, Attempt, left_by, report_failure, report_killed, report_restart
from automodel_cli.launch.kill_diagnosis import MemoryWatch

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_STOPPED_SECONDS = 5.0
"""Seconds without progress of a rank (Ctrl-Z and fg) before a message is printed."""
_PEER_SECONDS = 3.0
"""Seconds for the peers of a failed rank to report their state."""


def run(arguments: Sequence[str], *, num_ranks: int, max_restarts: int = 0, log_dir: Path | None = None) -> int:
    """Run `python -m automodel_cli ARGUMENTS` on `num_ranks` ranks and return the exit code of the run.

    Rank 0 uses the terminal. Other ranks write `rank-N.log` into `log_dir` until the recipe moves the logs into the run
    folder. Default: AUTOMODEL_LOG_DIR, else a temporary folder, which is kept when a rank fails.

    SIGINT, SIGTERM and SIGHUP reach every rank once. The launcher then waits for the step and its checkpoint. A second
    signal kills the ranks.

    If a rank fails, all ranks restart up to `max_restarts` times and resume the same run. Errors of config, data and
    memory are not retried.
    """
    base = Path(tempfile.mkdtemp(prefix="automodel-"))
    environment.set_own(rank_process.LOG_DIR, str(log_dir or os.environ.get(rank_process.LOG_DIR, base / "logs")))
    environment.set_default("OMP_NUM_THREADS", "1")  # several ranks share the cores; elastic would not set it
    # Peers of a crashed rank cannot go on: seconds until SIGKILL.
    environment.set_default("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3")
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the failing rank's output is better
    with _Relay(num_ranks) as relay:
        attempt = _start(arguments, num_ranks, relay, rank_process.make_status(base / "attempt-0", None))
        for restart in range(1, max_restarts + 1):
            if relay.received is not None or not attempt.may_be_tried_again():
                break
            run_folder = rank_process.run_folder_in(attempt.status)
            report_restart(attempt, f"{restart} of {max_restarts}", run_folder)
            status = rank_process.make_status(base / f"attempt-{restart}", run_folder)
            attempt = _start(arguments, num_ranks, relay, status)
    try:
        return _outcome(relay, attempt)
    finally:
        kept = any(str(base) in pointer.read_text() for pointer in base.rglob("rank-*.log"))
        if not (attempt.failures and kept):
            shutil.rmtree(base, ignore_errors=True)


def _start(arguments: Sequence[str], num_ranks: int, relay: _Relay, status: Path) -> Attempt:
    """Start every rank and wait until all have ended.

    Each attempt has its own torch agent and store. The agent could restart the ranks, but while the relay still waits
    for messages of the peers, so that the second of two failures would be missed.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ[rank_process.STATUS_DIR] = str(status)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # port 0: the store binds a free one
        local_addr="localhost",  # the name of this host may not resolve
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(status / "elastic")),
        signals_to_handle="SIGQUIT",  # not the three that `_Relay` handles
    )
    failures: Mapping[int, ProcessFailure] = {}
    memory = MemoryWatch()
    with relay.watching(status):
        try:
            elastic_launch(config, sys.executable)("-u", *safe_path(), "-m", "automodel_cli", *arguments)
        except ChildFailedError as error:
            failures = error.failures
        except SignalException:
            relay.killed = True
    return Attempt(status, failures, relay.first_failed, memory)


def _outcome(relay: _Relay, attempt: Attempt) -> int:
    """Return the exit code of the run: that of rank 0, or of the rank that failed first, which is reported."""
    if relay.killed:
        return signals.EXIT_CODES[signal.SIGINT] if relay.received == signal.SIGINT else FAILED
    if not attempt.failures:
        return left_by(attempt.status, 0) or 0
    code = left_by(attempt.status, attempt.first())
    if (pid := attempt.killed_process()) is not None:
        code = report_killed(attempt, pid)
    report_failure(attempt)
    return code or FAILED


def safe_path() -> list[str]:
    """-P keeps a `recipes` folder of the working directory from shadowing ours, unless this process depends on that
    folder.
    """
    return [] if {"", os.getcwd()} & set(sys.path) else ["-P"]


class _Relay:
    """Forwards the first signal to every worker, once each. Kills the workers on the second signal, and after a
    failure.

    One thread does both, because a worker may not have written its pid yet, and because peers of a crashed rank hang in
    a collective, where no Python handler runs, so that elastic would wait 30 s for them. The same applies to a rank
    that ended before it wrote its pid.
    """

    def __init__(self, num_ranks: int):
        self._num_ranks = num_ranks
        self._before: dict[signal.Signals, signals.Handler] = {}
        self._status: Path | None = None
        self.received: signal.Signals | None = None
        self.first_failed: int | None = None
        self.killed = False

    def __enter__(self) -> _Relay:
        self._before = signals.handle(self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    @contextlib.contextmanager
    def watching(self, status: Path) -> Iterator[None]:
        """While the ranks run that leave their pids and exit codes in `status`. Signals are held for the next ones."""
        self._status, self.first_failed = status, None
        done = threading.Event()
        thread = threading.Thread(target=self._watch, args=(status, done), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None and not signals.escalates(signum, self.received):
            if signum != signal.SIGHUP:
                self.received = signal.Signals(signum)
            return
        if self.received is not None:
            self.killed = True
            run_folder = None
            if self._status is not None:
                self._kill(self._status)
                run_folder = rank_process.run_folder_in(self._status)
            safe_output.urgent(f"\n{signals.exit_message(run_folder)}\n")
            return
        self.received = signal.Signals(signum)
        safe_output.urgent(f"\n{signals.message(signum)}\n")

    def _watch(self, status: Path, done: threading.Event) -> None:
        notified: set[int] = set()
        stopped: dict[int, float] = {}
        started: dict[int, int] = {}
        pids: dict[int, int] = {}
        last_moment = math.inf
        while not done.wait(0.1 if pids else 0.01):  # a rank may end sooner than any has a pid
            if self.killed or time.monotonic() > last_moment:
                self._kill(status)  # again and again: one may have been too young to have a pid
                continue
            if len(pids) < self._num_ranks:
                started |= _started(status)
            pids = self._pids(status)
            if self.received is not None:
                for rank in pids.keys() - notified:
                    notified.add(rank)
                    _send(pids[rank], self.received)
            self._watch_for_stopped(pids, stopped)
            failed = [rank for rank, pid in (started | pids).items() if self._failed(status, rank, pid)]
            if failed and self.first_failed is None:
                # a rank that died without a message is the cause of the errors of its peers
                self.first_failed = min(failed, key=lambda rank: left_by(status, rank) is not None)
                last_moment = time.monotonic() + _PEER_SECONDS

    def _watch_for_stopped(self, pids: Mapping[int, int], since: dict[int, float]) -> None:
        """Print a hint once if a rank is stopped (SIGSTOP, a debugger), because all other ranks wait for it."""
        for rank, pid in pids.items():
            if not _is_stopped(pid):
                since.pop(rank, None)
            elif time.monotonic() - since.setdefault(rank, time.monotonic()) > _STOPPED_SECONDS:
                since[rank] = math.inf
                hint = f"resume it with: kill -CONT {pid}"
                safe_output.urgent(
                    f"\nrank {rank} (process {pid}) is stopped, and the other ranks wait for it; {hint}\n"
                )

    def _failed(self, status: Path, rank: int, pid: int) -> bool:
        """Whether a rank has left a bad exit code, or is gone without leaving any."""
        alive = _alive(pid)
        code = left_by(status, rank)
        return not alive if code is None else code not in (0, *signals.EXIT_CODES.values())

    def _kill(self, status: Path) -> None:
        for rank, pid in self._pids(status).items():
            if left_by(status, rank) is None:  # a rank that has ended keeps its own message
                _send(pid, signal.SIGKILL)

    def _pids(self, status: Path) -> dict[int, int]:
        pids = {rank: _pid(status, rank) for rank in range(self._num_ranks)}
        return {rank: pid for rank, pid in pids.items() if pid is not None}


def _pid(status: Path, rank: int) -> int | None:
    path = status / f"rank-{rank}.pid"
    return int(path.read_text()) if path.exists() else None


def _started(status: Path) -> dict[int, int]:
    """Return the processes of an attempt's ranks before they report: children of this process, identified by their
    environment. Linux only.
    """
    pids: dict[int, int] = {}
    for children in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread or a child that is gone by now
            for pid in map(int, children.read_text().split()):
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                variables = dict(entry.partition(b"=")[::2] for entry in environ)
                if variables.get(rank_process.STATUS_DIR.encode()) == os.fsencode(status) and b"RANK" in variables:
                    pids[int(variables[b"RANK"])] = pid
    return pids


def _send(pid: int, signum: int) -> None:
    if _alive(pid):  # after elastic has reaped a process, its pid may belong to another one
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def _is_stopped(pid: int) -> bool:
    """Linux only."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def _alive(pid: int) -> bool:
    """Return whether a child runs. A finished child is left for elastic to reap; until then it would accept signals."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False
