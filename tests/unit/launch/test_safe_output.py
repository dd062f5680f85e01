"""A run's output and its signals, in real processes: closed terminals, broken pipes, `nohup`, full disks."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from automodel_cli.launch import safe_output, signals

ROOT = Path(__file__).parents[3]
RUN = """
import sys, time
from pathlib import Path
from automodel_cli.launch import rank_process, safe_output, signals
rank_process.begin()
safe_output.outlive_readers()
signals.install_handlers()
rank_process.note_run_folder(Path(sys.argv[1]))
for step in range(int(sys.argv[2])):
    print("step", step, flush=True)
    time.sleep(0.01)
    if signals.requested():
        break
print("saving", step)
Path(sys.argv[1], "saved").write_text(str(step))
rank_process.leave(signals.exit_code())
"""


def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    return tmp_path


def on_a_terminal(folder: Path, steps: int, act: Callable[[int, int], None], *wrapper: str) -> int:
    """Run `RUN` on a terminal; `act` gets the process and the terminal after the first step. Returns the exit code."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        command = [*wrapper, sys.executable, "-c", RUN, str(folder), str(steps)]
        os.execvp(command[0], command)
    seen = b""
    while b"step 0" not in seen:
        seen += os.read(terminal, 1024)
    act(pid, terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def closes(pid: int, terminal: int) -> None:
    os.close(terminal)


def test_a_closed_terminal_stops_a_run_after_its_step(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    assert on_a_terminal(folder, 10_000, closes) == 75
    step = int((folder / "saved").read_text())
    assert step < 9_999
    log = (folder / "logs" / "rank-0.log").read_text()
    assert log.splitlines()[0] == f"the output continues here: {os.strerror(5)}" and f"saving {step}" in log


def test_a_run_under_nohup_goes_on_without_its_terminal(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    ignores = "trap '' HUP; exec \"$@\""
    assert on_a_terminal(folder, 60, closes, "sh", "-c", ignores, "sh") == 0
    assert (folder / "saved").read_text() == "59"
    assert "step 59" in (folder / "logs" / "rank-0.log").read_text()


def test_a_second_hangup_is_no_second_request(tmp_path: Path) -> None:
    """A shell that is closed sends SIGHUP to its jobs, and the kernel sends it again."""

    def hangs_up(pid: int, terminal: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGHUP)
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGCONT)
        os.close(terminal)

    folder = run_folder(tmp_path)
    assert on_a_terminal(folder, 10_000, hangs_up) == 75
    assert (folder / "saved").exists()


@pytest.mark.parametrize("launched", [False, True])
def test_a_request_after_a_hangup_is_the_first_of_its_kind(launched: bool) -> None:
    signals.install_handlers(launched=launched)
    try:
        for signum in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), signum)
            time.sleep(0.01)
        assert signals.requested() is signal.SIGTERM
        assert signals.escalates(signal.SIGTERM, signal.SIGTERM)
    finally:
        signals.reset()


def test_a_pipe_without_a_reader_ends_no_run(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    command = [sys.executable, "-c", RUN, str(folder), "60"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    process.stderr.close()
    assert process.wait(60) == 0
    assert (folder / "saved").read_text() == "59"
    assert "saving 59" in (folder / "logs" / "rank-0.log").read_text()


@pytest.mark.parametrize("redirection", [">/dev/full 2>/dev/full", ">&- 2>&-", "<&- >/dev/null 2>&1"])
def test_output_that_cannot_be_written_is_dropped(tmp_path: Path, redirection: str) -> None:
    folder = run_folder(tmp_path)
    shell = f'exec "$@" {redirection}'
    command = ["sh", "-c", shell, "sh", sys.executable, "-c", RUN, str(folder), "3"]
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    assert (folder / "saved").read_text() == "2"


def test_a_text_that_the_terminal_cannot_encode_is_written_with_escapes(tmp_path: Path) -> None:
    code = "from automodel_cli.launch import safe_output\nsafe_output.outlive_readers()\nprint('a\\ud800\\u4e2d')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}
    )
    assert done.returncode == 0 and done.stdout == b"a\\ud800\\u4e2d\n"


def test_the_streams_come_back() -> None:
    before = (sys.stdout, sys.stderr)
    safe_output.outlive_readers()
    assert sys.stdout is not before[0]
    safe_output.restore_streams()
    assert (sys.stdout, sys.stderr) == before
