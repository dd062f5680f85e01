"""The worker's side of a start by `launch.local` or by our Slurm script: who I am, where my output goes, how I ended.

torch's elastic launcher and `srun --kill-on-bad-exit` report one flattened exit code and kill the peers of any worker
that exits non-zero. So a rank leaves its exit code in a file of the launcher's status folder, and a clean stop
(75, 130) leaves the process as 0.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from automodel_cli.launch import placement, stop

STATUS_DIR = "AUTOMODEL_STATUS_DIR"
"""Set by the launcher or the batch script for its workers, never by a user."""
LOG_DIR = "AUTOMODEL_LOG_DIR"
"""A user may set it: ranks other than 0 write `rank-N.log` there, under torchrun and srun too."""

_CLEAN_STOPS = frozenset(stop.EXIT_CODES.values())
_PR_SET_PDEATHSIG = 1
_RUN = "run-folder"
_FINAL = frozenset({2, 3, 4})
"""Usage or config, data, memory: what the same command would meet again."""
_status: Path | None = None
_earlier: tuple[Path, ...] = ()
"""The status folders of the attempts before this one, newest first."""


def begin() -> None:
    """First thing in a process: if it is a rank of ours, redirect its output, catch signals, tell the launcher its pid.

    The pid is written last: whoever can see it may send a signal and will be heard.
    """
    global _status, _earlier
    if STATUS_DIR not in os.environ:
        return
    base = Path(os.environ.pop(STATUS_DIR))  # popped: a process that this rank starts is no rank of the launcher
    count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    _status = attempt_folder(base, count)
    _status.mkdir(exist_ok=True)
    _earlier = tuple(attempt_folder(base, n) for n in reversed(range(count)))
    if count and (given_up(base) or any(is_final(code) for code in _codes(_earlier[0]))):
        os._exit(1)  # the agent does not know that another attempt is of no use
    if placement.detect().kind != "srun":  # Slurm ends what belongs to a step by itself
        _die_with_parent()
    redirect_output()
    stop.install(launched=True)
    _write(_status / f"rank-{_rank()}.pid", str(os.getpid()))


def attempt_folder(base: Path, restarts: int) -> Path:
    """Where the ranks of one attempt leave their pids and exit codes."""
    return base / f"restart-{restarts}" if restarts else base


def is_final(code: int) -> bool:
    """Whether a rank that left `code` would leave it again."""
    return code in _FINAL


def give_up(base: Path) -> None:
    """Let no further attempt begin."""
    _write(base / "give-up", "")


def given_up(base: Path) -> bool:
    return (base / "give-up").exists()


def restarted_run() -> Path | None:
    """The run that an earlier attempt of this rank was in the middle of; None for a first one."""
    return next((folder for status in _earlier if (folder := run_folder_in(status)) is not None), None)


def _codes(status: Path) -> list[int]:
    return [int(path.read_text()) for path in status.glob("rank-*.exit")]


def is_ours() -> bool:
    """Whether this process is a rank that `launch.local` or our Slurm script started."""
    return _status is not None


def redirect_output(log_dir: Path | None = None) -> None:
    """Send stdout and stderr of this rank to `log_dir/rank-N.log`; rank 0 keeps the terminal.

    Without a folder, AUTOMODEL_LOG_DIR decides, and nothing happens where it is unset. Works on file descriptors, so
    that the output of C++ (NCCL) goes along. A recipe calls it once the run folder is known.
    """
    rank = _rank()
    folder = log_dir or (Path(os.environ[LOG_DIR]) if LOG_DIR in os.environ else None)
    if rank == "0" or folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank}.log"
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("ab") as stream:
        start = stream.tell()  # a run that was resumed has written here before
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    if _status is not None:
        _write(_status / f"rank-{rank}.log", f"{start} {path.resolve()}")


def note_run_folder(folder: Path) -> None:
    """Tell whoever has to say later how to go on: this process's signal handler, and the launcher. Rank 0 calls it."""
    stop.note_run_folder(folder)
    if _status is not None:
        _write(_status / _RUN, str(folder))


def run_folder_in(status: Path) -> Path | None:
    """The run folder that rank 0 has noted, for the launcher."""
    path = status / _RUN
    return Path(path.read_text()) if path.exists() else None


def latest_run_folder(base: Path, restarts: int) -> Path | None:
    """The run folder that rank 0 of the newest of so many attempts has noted."""
    folders = (run_folder_in(attempt_folder(base, n)) for n in reversed(range(restarts)))
    return next((folder for folder in folders if folder is not None), None)


def finish(code: int) -> int:
    """Leave `code` for the launcher; returns what the process itself should exit with."""
    if _status is None:
        return code
    _write(_status / f"rank-{_rank()}.exit", str(code))
    return 0 if code in _CLEAN_STOPS else code


def leave(code: int) -> NoReturn:
    """End this process with `code` (75 and 130 as 0, see `finish`); a rank by `_exit`, after `atexit`'s functions.

    An ordinary exit of the interpreter would destroy the groups that the model still refers to, and now and then gloo's
    threads abort the process then: a run that has succeeded would be told as failed.
    """
    code = finish(code)
    if "RANK" not in os.environ:
        sys.exit(code)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _rank() -> str:
    return os.environ.get("RANK", "0")


def _die_with_parent() -> None:
    """A launcher that is killed (-9) must not leave ranks behind that go on writing into the run. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _write(path: Path, text: str) -> None:
    """Whole or not at all: the launcher may look at any moment."""
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(text)
    temporary.rename(path)
