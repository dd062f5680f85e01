"""Start the ranks of one host with torch's own launcher, and end as rank 0 did."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from automodel_cli.launch import stop, worker

_FAILED = 1
_CONFIG = 2
_OUT_OF_MEMORY = 4


def run(arguments: Sequence[str], *, num_ranks: int, log_dir: Path | None = None) -> int:
    """Run `python -m automodel_cli ARGUMENTS` on `num_ranks` ranks and return the exit code of the run.

    Rank 0 has the terminal; the others write `rank-N.log` into `log_dir` (default: AUTOMODEL_LOG_DIR, else a temporary
    folder that is kept when a rank fails) until the recipe moves them into the run folder. SIGINT, SIGTERM and SIGHUP
    reach every worker once; the launcher then waits as long as the step and its checkpoint take. A second signal kills
    the workers.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    status = Path(tempfile.mkdtemp(prefix="automodel-"))
    logs = log_dir or Path(os.environ.get(worker.LOG_DIR, status / "logs"))
    os.environ.update({worker.STATUS_DIR: str(status), worker.LOG_DIR: str(logs)})
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # several ranks share the cores; elastic itself would leave it unset
    os.environ.setdefault(
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "10"
    )  # for the peers of a crashed rank, stuck in a collective
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the failing rank's own text says more
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # port 0: the store binds a free one
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(status / "elastic")),
        signals_to_handle="SIGQUIT",  # not the three that `_Relay` handles
    )
    with _Relay(status, num_ranks) as relay:
        try:
            elastic_launch(config, sys.executable)("-u", *_safe_path(), "-m", "automodel_cli", *arguments)
            failed = None
        except ChildFailedError as error:
            failed = error.get_first_failure()[1].local_rank
        except SignalException:
            failed = 0
    code = _exit_code(status, relay, failed)
    if failed is not None and not relay.killed:
        _report(status, failed, code)
    else:
        shutil.rmtree(status, ignore_errors=True)
    return code


def _safe_path() -> list[str]:
    """-P keeps a `recipes` folder of the working directory from shadowing ours, unless this process depends on that
    folder.
    """
    return [] if {"", os.getcwd()} & set(sys.path) else ["-P"]


class _Relay:
    """Hands the first signal to every worker, once each, and kills them on the second.

    A worker that has not written its pid yet gets the signal as soon as it has: a thread waits for it.
    """

    def __init__(self, status: Path, num_ranks: int):
        self._status, self._num_ranks = status, num_ranks
        self._done = threading.Event()
        self._before: dict[signal.Signals, object] = {}
        self.received: signal.Signals | None = None
        self.killed = False

    def __enter__(self) -> _Relay:
        self._before = {s: signal.signal(s, self._on_signal) for s in stop.EXIT_CODES}
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            self.killed = True
            for pid in self._pids().values():
                _send(pid, signal.SIGKILL)
            return
        self.received = signal.Signals(signum)
        os.write(sys.stderr.fileno(), f"\n{stop.message(signum)}\n".encode())
        threading.Thread(target=self._deliver, args=(self.received,), daemon=True).start()

    def _deliver(self, signum: signal.Signals) -> None:
        told: set[int] = set()
        while len(told) < self._num_ranks and not self._done.is_set():
            for rank, pid in self._pids().items():
                if rank not in told:
                    told.add(rank)
                    _send(pid, signum)
            time.sleep(0.05)

    def _pids(self) -> dict[int, int]:
        paths = {rank: self._status / f"rank-{rank}.pid" for rank in range(self._num_ranks)}
        return {rank: int(path.read_text()) for rank, path in paths.items() if path.exists()}


def _send(pid: int, signum: signal.Signals) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass  # it has just ended by itself


def _exit_code(status: Path, relay: _Relay, failed: int | None) -> int:
    """Rank 0's own code where it left one; else the code of the rank that failed first, else 1."""
    if relay.killed:
        return 130 if relay.received == signal.SIGINT else _FAILED
    if failed is None:
        return _left_by(status, 0) or 0
    codes = [_left_by(status, failed), _left_by(status, 0)]
    return next((code for code in codes if code not in (None, 0)), None) or _FAILED


def _left_by(status: Path, rank: int) -> int | None:
    path = status / f"rank-{rank}.exit"
    return int(path.read_text()) if path.exists() else None


def _report(status: Path, failed: int, code: int, num_lines: int = 20) -> None:
    """Say which rank failed and show the end of its log; rank 0 has already written to the terminal."""
    pointer = status / f"rank-{failed}.log-path"
    if failed == 0 or not pointer.exists():
        if code not in (_CONFIG, _OUT_OF_MEMORY):
            print(f"rank {failed} failed; logs of the other ranks: {status / 'logs'}", file=sys.stderr)
        return
    path = Path(pointer.read_text())
    print(f"\nrank {failed} failed; the end of {path}:", file=sys.stderr)
    for line in path.read_text(errors="replace").splitlines()[-num_lines:]:
        print(f"  {line}", file=sys.stderr)
