"""Start the ranks of one host with torch's own launcher, and end as rank 0 did."""

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from automodel_cli.config.errors import RunError
from automodel_cli.launch import stop, worker
from automodel_cli.launch.killed import MemoryWatch

_FAILED, _OUT_OF_MEMORY = 1, 4
_STOPPED_SECONDS = 5.0
"""How long a rank may stand still (Ctrl-Z and fg) before that is said."""
_PEER_SECONDS = 3.0
"""How long the peers of a failed rank may take to say what they saw."""


def run(arguments: Sequence[str], *, num_ranks: int, max_restarts: int = 0, log_dir: Path | None = None) -> int:
    """Run `python -m automodel_cli ARGUMENTS` on `num_ranks` ranks and return the exit code of the run.

    Rank 0 has the terminal; the others write `rank-N.log` into `log_dir` (default: AUTOMODEL_LOG_DIR, else a temporary
    folder that is kept when a rank fails) until the recipe moves them into the run folder. SIGINT, SIGTERM and SIGHUP
    reach every worker once; the launcher then waits as long as the step and its checkpoint take. A second signal kills
    the workers.

    Where a rank fails or is killed, torch's agent starts all of them again, up to `max_restarts` times; they find the
    run that they were in (`worker.restarted_run`). Errors of config, data and memory are not tried again.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    status = Path(tempfile.mkdtemp(prefix="automodel-"))
    logs = log_dir or Path(os.environ.get(worker.LOG_DIR, status / "logs"))
    os.environ.update({worker.STATUS_DIR: str(status), worker.LOG_DIR: str(logs)})
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores; elastic itself would leave it unset
    os.environ.setdefault(
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "3"
    )  # peers of a crashed rank cannot go on: s until SIGKILL
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the failing rank's own text says more
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # port 0: the store binds a free one
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(log_dir=str(status / "elastic")),
        signals_to_handle="SIGQUIT",  # not the three that `_Relay` handles
    )
    exit_codes: dict[int, int] = {}
    memory = MemoryWatch()
    with _Relay(status, num_ranks, max_restarts, memory) as relay:
        try:
            elastic_launch(config, sys.executable)("-u", *safe_path(), "-m", "automodel_cli", *arguments)
        except ChildFailedError as error:
            exit_codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except SignalException:
            relay.killed = True
    try:
        return _outcome(relay, exit_codes, memory)
    finally:
        kept = any(str(status) in pointer.read_text() for pointer in status.rglob("rank-*.log"))
        if not (exit_codes and kept):
            shutil.rmtree(status, ignore_errors=True)


def _outcome(relay: _Relay, exit_codes: Mapping[int, int], memory: MemoryWatch) -> int:
    """The exit code of the run: rank 0's own, or that of the rank that failed first, which is reported."""
    if relay.killed:
        return stop.EXIT_CODES[signal.SIGINT] if relay.received == signal.SIGINT else _FAILED
    status = relay.status
    if not exit_codes:
        return _left_by(status, 0) or 0
    first = relay.first_failed if relay.first_failed is not None else _first_failure(status, exit_codes)
    code = _left_by(status, first)
    if code is None and exit_codes.get(first) == -signal.SIGKILL:
        code = _report_killed(status, first, memory)
    _report(status, first, exit_codes.get(first))
    return code or _FAILED


def safe_path() -> list[str]:
    """-P keeps a `recipes` folder of the working directory from shadowing ours, unless this process depends on that
    folder.
    """
    return [] if {"", os.getcwd()} & set(sys.path) else ["-P"]


class _Relay:
    """Hands the first signal to every worker, once each; kills the workers on the second, and when one of them has
    failed.

    One thread does both, because a worker may not have written its pid yet, and because peers of a crashed rank hang in
    a collective, where no Python handler runs: elastic would wait 30 s for them.
    """

    def __init__(self, base: Path, num_ranks: int, max_restarts: int, memory: MemoryWatch):
        self.status = self._base = base
        self._num_ranks, self._max_restarts, self._restarts, self._memory = num_ranks, max_restarts, 0, memory
        self._done = threading.Event()
        self._before: dict[signal.Signals, object] = {}
        self.received: signal.Signals | None = None
        self.first_failed: int | None = None
        self.killed = False

    def __enter__(self) -> _Relay:
        self._before = {s: signal.signal(s, self._on_signal) for s in stop.EXIT_CODES}
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            self.killed = True
            worker.give_up(self._base)
            self._kill()
            os.write(sys.stderr.fileno(), f"\n{stop.last_words(worker.run_folder_in(self.status))}\n".encode())
            return
        self.received = signal.Signals(signum)
        os.write(sys.stderr.fileno(), f"\n{stop.message(signum)}\n".encode())

    def _watch(self) -> None:
        told: set[int] = set()
        stopped: dict[int, float] = {}
        while not self._done.wait(0.1):
            if self.received is not None:
                for rank, pid in self._pids().items():
                    if rank not in told:
                        told.add(rank)
                        _send(pid, self.received)
            self._watch_for_stopped(stopped)
            if failed := [rank for rank, pid in self._pids().items() if self._failed(rank, pid)]:
                # one that died without a word is the cause of what the others say
                self.first_failed = min(failed, key=lambda rank: _left_by(self.status, rank) is not None)
                self._done.wait(_PEER_SECONDS)
                self._kill()
                if not self._starts_again(self.first_failed):
                    return
                told.clear()
                stopped.clear()

    def _starts_again(self, failed: int) -> bool:
        """Whether torch's agent starts the ranks once more; then say why, and look at those from here on."""
        code = _left_by(self.status, failed)
        if self._restarts == self._max_restarts or self.received or (code is not None and worker.is_final(code)):
            worker.give_up(self._base)
            return False
        self._restarts += 1
        folder = worker.latest_run_folder(self._base, self._restarts)
        begin = stop.begins_at(folder) if folder is not None else "starts over: nothing was trained yet"
        if code is None:
            why = f"process {_pid(self.status, failed)} {self._memory.why(_pid(self.status, failed) or 0).by}"
            print(f"\nrank {failed} was killed: {why}", file=sys.stderr)
        else:
            _report(self.status, failed, code)
        print(f"restart {self._restarts} of {self._max_restarts} (train.max_restarts): {begin}", file=sys.stderr)
        self.status, self.first_failed = worker.attempt_folder(self._base, self._restarts), None
        return True

    def _watch_for_stopped(self, since: dict[int, float]) -> None:
        """A rank that does not run (SIGSTOP, a debugger) holds up all others without a word: say so, once."""
        for rank, pid in self._pids().items():
            if not _is_stopped(pid):
                since.pop(rank, None)
            elif time.monotonic() - since.setdefault(rank, time.monotonic()) > _STOPPED_SECONDS:
                since[rank] = math.inf
                said = (
                    f"rank {rank} (process {pid}) is stopped, and the others wait for it; go on with: kill -CONT {pid}"
                )
                os.write(sys.stderr.fileno(), f"\n{said}\n".encode())

    def _failed(self, rank: int, pid: int) -> bool:
        """Whether a rank has left a bad exit code, or is gone without leaving any."""
        alive = _alive(pid)
        code = _left_by(self.status, rank)
        return not alive if code is None else code not in (0, *stop.EXIT_CODES.values())

    def _kill(self) -> None:
        for rank, pid in self._pids().items():
            if _left_by(self.status, rank) is None:  # one that has ended keeps its own words
                _send(pid, signal.SIGKILL)

    def _pids(self) -> dict[int, int]:
        pids = {rank: _pid(self.status, rank) for rank in range(self._num_ranks)}
        return {rank: pid for rank, pid in pids.items() if pid is not None}


def _pid(status: Path, rank: int) -> int | None:
    path = status / f"rank-{rank}.pid"
    return int(path.read_text()) if path.exists() else None


def _send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _is_stopped(pid: int) -> bool:
    """Linux only."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False


def _alive(pid: int) -> bool:
    """Whether a child runs. One that has ended is left for elastic to reap; until then it would take signals."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _first_failure(status: Path, exit_codes: Mapping[int, int]) -> int:
    """Which of the failed ranks (in the order of their discovery) is the cause, where nobody saw it happen.

    Ranks that elastic has ended with a signal are its victims. Of the rest, one that died without a word comes before
    its peers, which then lose their connection; else the one that wrote its exit code first.
    """
    ended = (-signal.SIGTERM, -signal.SIGKILL)
    suspects = [rank for rank, code in exit_codes.items() if code not in ended] or list(exit_codes)[:1]
    files = {rank: status / f"rank-{rank}.exit" for rank in suspects}
    return min(suspects, key=lambda rank: files[rank].stat().st_mtime_ns if files[rank].exists() else 0)


def _ending(exit_code: int | None) -> str:
    if exit_code is None:
        return "killed?"
    return signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"


def _left_by(status: Path, rank: int) -> int | None:
    path = status / f"rank-{rank}.exit"
    return int(path.read_text()) if path.exists() else None


def _report_killed(status: Path, rank: int, memory: MemoryWatch) -> int:
    """Say that a rank was killed from outside, by whom, and how to go on; returns the exit code."""
    pid = _pid(status, rank)
    assert pid is not None, "a rank that never told its pid cannot be the first that failed"
    evidence = memory.why(pid)
    less = "model.dtype=bfloat16, a smaller train.microbatch_size or data.seq_len, or more ranks; then "
    error = RunError(
        f"rank {rank} (process {pid}) was killed by SIGKILL, {evidence.by}",
        origin=evidence.source,
        fix=f"{less if evidence.out_of_memory else ''}{stop.how_to_go_on(worker.run_folder_in(status))}",
    )
    print(f"RunError: {error}", file=sys.stderr)
    return _OUT_OF_MEMORY if evidence.out_of_memory else _FAILED


def _report(status: Path, failed: int, exit_code: int | None, num_lines: int = 20) -> None:
    """Say which rank failed and show the end of its log. Rank 0 has written to the terminal itself."""
    pointer = status / f"rank-{failed}.log"
    how = "failed" if _left_by(status, failed) else f"died without a word ({_ending(exit_code)})"
    if not pointer.exists():
        if _left_by(status, failed) is None:
            print(f"rank {failed} {how}", file=sys.stderr)
        return
    start, _, path = pointer.read_text().partition(" ")
    print(f"\nrank {failed} {how}; the end of {path}:", file=sys.stderr)
    with Path(path).open(errors="replace") as stream:
        stream.seek(int(start))
        for line in stream.read().splitlines()[-num_lines:]:
            print(f"  {line}", file=sys.stderr)
