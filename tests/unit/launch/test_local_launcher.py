"""Two real gloo ranks through the real command: what they see, exit codes, logs, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from automodel_cli.config.errors import RunError
from automodel_cli.launch import rank_process
from automodel_cli.launch import signals as launch_signals
from tests import warm
from tests.errors import assert_error

HERE = Path(__file__).parents[1]
TRUST = ["--trust-package", "toy_recipe"]


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    (tmp_path / "toy.yaml").write_text(
        "_target_: toy_recipe.nodes.Recipe\n"
        "data: {path: train.jsonl}\n"
        "optimizer: {_target_: toy_recipe.nodes.Optimizer}\n"
    )
    return tmp_path


def environment(folder: Path, **env: str) -> dict[str, str]:
    drop = ("AUTOMODEL_", "SLURM_", "OMP_NUM")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(drop)}
    return environ | {"PYTHONPATH": f"{HERE}:{HERE.parents[1]}", "TMPDIR": str(folder), **env}


def start(folder: Path, *arguments: str) -> warm.Command:
    return warm.Command(arguments, folder, environment(folder), new_session=True)


def start_cold(folder: Path, *arguments: str, launcher: tuple[str, ...] = (), **env: str) -> subprocess.Popen[str]:
    """`start` in new interpreters."""
    command = [sys.executable, *launcher, "-m", "automodel_cli", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment(folder, **env),
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    )


@pytest.mark.slow
def test_two_ranks_through_the_real_command(toy: Path) -> None:
    process = start_cold(toy, "finetune", "llm", "-c", "toy.yaml", *TRUST, "mesh.dp_size=2")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.splitlines() == ["rank 0 omp 1", *(f"step {i} total 2" for i in (1, 2, 3))], "the ranks see each other"
    assert err == ""
    assert (toy / "runs/toy/logs/rank-1.log").read_text() == "rank 1 omp 1\n"
    assert not (toy / "runs/toy/logs/rank-0.log").exists()
    assert not list(toy.glob("automodel-*")), "no temporary folder stays behind"


@pytest.mark.slow
def test_under_torchrun_a_rank_runs_in_place(toy: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-endpoint", "localhost:0")
    launcher += ("--rdzv-backend", "c10d")
    process = start_cold(
        toy, "finetune", "llm", "-c", "toy.yaml", *TRUST, "mesh.dp_size=2", launcher=launcher, AUTOMODEL_LOG_DIR="logs"
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "step 3 total 2" in out and out.count("step 3") == 1
    assert (toy / "logs/rank-1.log").exists()


@pytest.mark.parametrize(
    ("fail", "rank", "code"),
    [
        ("data", 0, 3),
        pytest.param("memory", 1, 4, marks=pytest.mark.slow),
        pytest.param("hard", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(toy: Path, fail: str, rank: int, code: int) -> None:
    process = start(toy, "toy.yaml", *TRUST, "mesh.dp_size=2", f"fail={fail}", f"fail_rank={rank}")
    _, err = process.communicate(timeout=120)
    assert process.returncode == code
    if fail == "data":
        assert err == "DataError [invalid_data]: row 7 has no supervised token\n  fix   data.on_invalid_row=drop\n"
    elif fail == "memory":
        assert "rank 1 failed; the end of" in err and "  toy_recipe.nodes.OutOfMemoryError: wanted 2.3 GiB\n" in err
    else:
        assert "rank 1 ended without an error message (exit code 9); the end of" in err


def wait_for_start(process: warm.Command, folder: Path, num_ranks: int) -> None:
    deadline = time.monotonic() + 100
    while not all((folder / f"runs/toy/started-{rank}").exists() for rank in range(num_ranks)):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("num_ranks", "signum", "whole_group", "code"),
    [
        (1, signal.SIGINT, False, 130),
        (1, signal.SIGTERM, False, 75),
        (2, signal.SIGINT, True, 130),
        pytest.param(2, signal.SIGTERM, False, 75, marks=pytest.mark.slow),
        (2, signal.SIGUSR1, False, 75),
    ],
)
def test_a_signal_ends_at_a_step_boundary(toy: Path, num_ranks: int, signum: int, whole_group: bool, code: int) -> None:
    """`whole_group` is what a terminal does on Ctrl-C; the workers must still hear it once only."""
    slow = ("train.max_steps=1000", "train.step_seconds=0.2")
    process = start(toy, "toy.yaml", *TRUST, f"mesh.dp_size={num_ranks}", *slow)
    wait_for_start(process, toy, num_ranks)
    time.sleep(0.3)
    (os.killpg if whole_group else os.kill)(process.pid, signum)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    done = json.loads((toy / "runs/toy/done.json").read_text())["step"]
    assert 1 <= done < 1000 and out.splitlines()[-1] == f"step {done} total {num_ranks}"
    assert err.strip() == launch_signals.message(signum)
    assert not list(toy.glob("automodel-*"))


def test_a_second_signal_kills_and_nothing_stays_behind(toy: Path) -> None:
    process = start(toy, "toy.yaml", *TRUST, "mesh.dp_size=2", "train.max_steps=1000", "train.step_seconds=30")
    wait_for_start(process, toy, 2)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None, "waits for the step"
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped immediately; saved checkpoints are complete" in err and "\n  automodel resume runs/toy " in err


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rank_that_was_killed_is_named_and_its_peer_is_not_blamed(toy: Path, rank: int) -> None:
    process = start(toy, "toy.yaml", *TRUST, "mesh.dp_size=2", "train.max_steps=1000", "train.step_seconds=0.2")
    wait_for_start(process, toy, 2)
    (status,) = toy.glob("automodel-*/attempt-0")
    pid = int((status / f"rank-{rank}.pid").read_text())
    os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    fix = "automodel resume runs/toy   (starts over: no checkpoint was written yet)"
    assert_error(err, "rank_failure", values=(f"rank {rank}", f"process {pid}", "SIGKILL"), fix=fix)
    assert f"rank {1 - rank} failed" not in err and f"rank {1 - rank} died" not in err
    if rank == 0:
        log = (toy / "runs/toy/logs/rank-1.log").read_text()
        assert_error(log, "rank_failure", values=("rank 1 of 2",))


RESTARTS = ("fail=crash", "failures=1", "train.max_restarts=2")


def test_every_failure_is_told_and_counted_however_soon_it_follows(toy: Path) -> None:
    process = start(toy, "toy.yaml", *TRUST, *RESTARTS, "failures=2")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    restarts = [f"restart {n} of 2 (train.max_restarts): starts over: no checkpoint was written yet" for n in (1, 2)]
    died = "rank 0 ended without an error message (SIGSEGV)"
    assert err.splitlines() == [died, restarts[0], died, restarts[1]]
    assert out.splitlines() == ["rank 0 omp 1"] * 3 + [f"step {n} total 1" for n in (1, 2, 3)]
    assert not list(toy.glob("automodel-*"))


@pytest.mark.parametrize(
    ("fail", "code", "starts"), [("crash", 1, 3), pytest.param("raise", 1, 3, marks=pytest.mark.slow), ("data", 3, 1)]
)
def test_the_last_attempt_is_the_outcome_and_what_would_fail_again_is_not_tried_again(
    toy: Path, fail: str, code: int, starts: int
) -> None:
    process = start(toy, "toy.yaml", *TRUST, *RESTARTS, f"fail={fail}", "failures=1000")
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert out.splitlines() == ["rank 0 omp 1"] * starts and err.count("restart ") == starts - 1
    said = {
        "crash": "rank 0 ended without an error message (SIGSEGV)",
        "raise": "ValueError: rank 0 is broken",
        "data": "DataError [",
    }
    assert err.count(said[fail]) == starts and not re.search("restart .*", err.splitlines()[-1])


def test_a_rank_that_the_kernel_killed_for_memory_is_not_started_again(toy: Path, small_group: Path) -> None:
    process = start(toy, "toy.yaml", *TRUST, *RESTARTS, "fail=oom", f"memory_group={small_group}")
    out, err = process.communicate(timeout=60)
    if "cannot be read here" in err:
        pytest.skip("this machine does not let us read the kernel's log")
    assert process.returncode == 4, err
    assert out.splitlines() == ["rank 0 omp 1"] and "restart" not in err
    assert re.search(r"RunError \[out_of_memory\]: rank 0 \(process \d+\) was killed by SIGKILL, by the kernel", err)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the launcher finds young ranks in /proc")
def test_the_peers_of_a_rank_that_ends_before_it_can_say_a_word_do_not_wait_for_it(toy: Path) -> None:
    """torch's launcher alone ends them 30 s later."""
    (toy / "sitecustomize.py").write_text("import os\nif os.environ.get('RANK') == '1':\n    os._exit(9)\n")
    path = {"PYTHONPATH": f"{toy}:{environment(toy)['PYTHONPATH']}"}
    begin = time.monotonic()
    process = start_cold(toy, "toy.yaml", *TRUST, "mesh.dp_size=2", **path)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err == "rank 1 ended without an error message (exit code 9)\n"
    assert time.monotonic() - begin < 20


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_while_ranks_start_again_is_for_those(toy: Path, signals: int) -> None:
    """The first one reaches a rank once it listens; the second one ends it, even where it is too young to be known."""
    process = start(toy, "toy.yaml", *TRUST, *RESTARTS, f"train.step_seconds={60 if signals == 2 else 0.1}")
    deadline = time.monotonic() + 60
    while not list(toy.glob("automodel-*/attempt-1")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.001)
    for _ in range(signals):
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.05)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert err.count("restart 1 of 2") == 1 and "restart 2" not in err and launch_signals.message(signal.SIGINT) in err
    assert ("stopped immediately" in err) == (signals == 2) and ("step 1 total 1" in out) == (signals == 1)


def test_a_run_that_was_asked_to_stop_is_not_started_again(toy: Path) -> None:
    process = start(toy, "toy.yaml", *TRUST, "train.max_restarts=2", "train.step_seconds=60")
    wait_for_start(process, toy, 1)
    os.kill(process.pid, signal.SIGINT)
    time.sleep(0.3)
    (pid,) = (int(path.read_text()) for path in toy.glob("automodel-*/attempt-0/rank-0.pid"))
    os.kill(pid, signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1 and f"rank 0 (process {pid}) was killed by SIGKILL" in err and "restart" not in err


def test_ranks_die_with_a_killed_launcher(toy: Path) -> None:
    process = start(toy, "toy.yaml", *TRUST, "mesh.dp_size=2", "train.max_steps=1000", "train.step_seconds=0.2")
    wait_for_start(process, toy, 2)
    (status,) = toy.glob("automodel-*/attempt-0")
    pids = [int((status / f"rank-{rank}.pid").read_text()) for rank in range(2)]
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while any(_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    """Running, not a zombie that nobody has reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_torchrun_is_given_the_reason_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun reads it; the output of a rank other than 0 is in its log."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setattr(rank_process, "_status", None)
    for error in (RunError("no rows", fix="a fix"), ValueError("a bug")):
        rank_process.note_error(error)
        failure = ProcessFailure(local_rank=1, pid=1, exitcode=1, error_file=str(path))
        text = error.full_text if isinstance(error, RunError) else f"ValueError: {error}"
        assert text in failure.message["extraInfo"]["py_callstack"]
        assert abs(failure.timestamp - time.time()) < 60
    path.unlink()
    monkeypatch.setattr(rank_process, "_status", tmp_path)
    rank_process.note_error(ValueError("a bug"))
    assert not path.exists(), "our own launcher prints the reason itself"
