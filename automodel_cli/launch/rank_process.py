"""Rank side of the local launcher and the Slurm script: pid files, output redirection and exit codes.

torch's elastic launcher and `srun --kill-on-bad-exit` report one flattened exit code and kill the peers of any worker
that exits non-zero. Therefore a rank writes its exit code to a file of the launcher's status folder, and exits with 0
after a clean stop (75, 130).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.config.security.safe_files import open_own, replace
from automodel_cli.launch import process_context, safe_output, signals

STATUS_DIR = "AUTOMODEL_STATUS_DIR"
"""Set by the launcher or the batch script for its workers, never by a user."""
LOG_DIR = "AUTOMODEL_LOG_DIR"
"""A user may set it: ranks other than 0 write `rank-N.log` there, under torchrun and srun too."""

_CLEAN_STOPS = frozenset(signals.EXIT_CODES.values())
_PR_SET_PDEATHSIG = 1
_RUN, _EARLIER_RUN = "run-folder", "earlier-run-folder"
_FINAL = frozenset({2, 3, 4})
"""Usage or config, data, memory: errors that the same command would repeat."""
_SECONDS_TO_SEE = 10.0
_TORCHRUN_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_status: Path | None = None


def begin() -> None:
    """Set up a rank at process start: redirect output, install signal handlers and write the pid file.

    The pid file is written last, because a visible pid may receive signals.
    """
    global _status
    safe_output.open_missing()
    if STATUS_DIR not in os.environ:
        return
    _status = Path(os.environ.pop(STATUS_DIR))  # child processes of this rank are not ranks of the launcher
    if process_context.detect().kind != "srun":  # Slurm ends the processes of a step itself
        _die_with_parent()
    elif not _appears(_status):
        _refuse_unshared(_status.absolute())
    redirect_output()
    signals.install_handlers(launched=True)
    _write(_status / f"rank-{_rank()}.pid", str(os.getpid()))


def make_status(status: Path, run_folder: Path | None) -> Path:
    """Create the status folder of one attempt, in which ranks write their pids and exit codes.

    Args:
        run_folder: the run folder of an earlier attempt.
    """
    status.mkdir()
    if run_folder is not None:
        _write(status / _EARLIER_RUN, str(run_folder))
    return status


def is_final(code: int | None) -> bool:
    """Return whether a restart of a rank with exit code `code` would fail in the same way."""
    return code in _FINAL


def restarted_run() -> Path | None:
    """Return the run folder of an earlier attempt of this rank, or None."""
    return _noted(_status / _EARLIER_RUN) if _status is not None else None


def is_launched_rank() -> bool:
    """Return whether `launch.local` or the Slurm script started this process."""
    return _status is not None


def redirect_output(log_dir: Path | None = None) -> None:
    """Send stdout and stderr of this rank to `log_dir/rank-N.log`; rank 0 keeps the terminal.

    Without a folder, AUTOMODEL_LOG_DIR is used, if set. Redirects file descriptors, so that the output of C++ (NCCL) is
    included. A recipe calls it when the run folder is known.
    """
    rank = _rank()
    folder = log_dir or (Path(os.environ[LOG_DIR]) if LOG_DIR in os.environ else None)
    if rank == "0" or folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{rank}.log"
    sys.stdout.flush()
    sys.stderr.flush()
    with open_own(path, "a", binary=True) as stream:
        start = stream.tell()  # the end of a resumed run's earlier output
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    if _status is not None:
        _write(_status / f"rank-{rank}.log", f"{start} {path.resolve()}")


def note_run_folder(folder: Path) -> None:
    """Report the run folder to the signal handler and the launcher, for resume hints. Called by rank 0."""
    signals.note_run_folder(folder)
    safe_output.continue_in(folder / "logs" / "rank-0.log")
    if _status is not None:
        _write(_status / _RUN, str(folder))


def forget_run_folder() -> None:
    """Make a restart use the complete command line again, as in this attempt."""
    if _status is not None:
        (_status / _RUN).unlink(missing_ok=True)


def run_folder_in(status: Path) -> Path | None:
    """Return the run folder that rank 0 reported, or that of the earlier attempt, for the launcher."""
    return _noted(status / _RUN) or _noted(status / _EARLIER_RUN)


def report_exit_code(code: int) -> int:
    """Write `code` for the launcher, and return the exit code of this process."""
    if _status is None:
        return code
    _write(_status / f"rank-{_rank()}.exit", str(code))
    return 0 if code in _CLEAN_STOPS else code


def note_error(error: BaseException) -> None:
    """Write the error to torchrun's error file. torchrun prints that of the rank that failed first.

    The output of other ranks is in their logs, and torchrun ends rank 0 before it could detect the failure.
    """
    path = os.environ.get(_TORCHRUN_ERROR_FILE)
    if path is None or _status is not None:
        return
    text = error.full_text if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    full_text = text if isinstance(error, ConfigError) else "".join(traceback.format_exception(error))
    extra = {"py_callstack": full_text, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):
        _write(Path(path), json.dumps({"message": {"message": text, "extraInfo": extra}}))


def leave(code: int) -> NoReturn:
    """End this process with `code` (75 and 130 as 0, see `finish`). A rank ends with `_exit` after `atexit`'s
    functions.

    An ordinary exit would destroy the process groups that the model still uses. gloo's threads then sometimes abort the
    process, and a successful run would be reported as failed.
    """
    code = report_exit_code(code)
    if "RANK" not in os.environ:
        safe_output.flush()
        sys.exit(code)
    atexit._run_exitfuncs()
    safe_output.flush()
    os._exit(code)


def _rank() -> str:
    return os.environ.get("RANK", "0")


def _die_with_parent() -> None:
    """End with the parent: a launcher killed with -9 must not leave ranks that continue to write. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _appears(folder: Path) -> bool:
    """Return whether this host sees the files of the batch script. A network file system may be delayed."""
    deadline = time.monotonic() + _SECONDS_TO_SEE
    while not folder.is_dir():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _refuse_unshared(status: Path) -> NoReturn:
    """End before this rank's output goes to an unreachable log. srun forwards stderr to the log of the job."""
    error = RunError(
        f"{os.environ.get('SLURMD_NODENAME')} does not see {status}, which the first node of the job has made: the "
        "run folder is not on a file system that all nodes share",
        code="not_shared",
        keys=("output_dir",),
        fix="output_dir=/a/shared/file/system/runs",
    )
    safe_output.urgent(f"{error.full_text}\n")
    os._exit(2)


def _noted(path: Path) -> Path | None:
    return Path(path.read_text()) if path.exists() else None


def _write(path: Path, text: str) -> None:
    """Write atomically, because the launcher may read at any time."""
    replace(path, text)
