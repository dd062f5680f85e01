"""Two nodes of a real Slurm: a job that is told to leave saves, is requeued, and ends like one that was left alone."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import slurm_cluster
from tests.e2e.command import automodel, curve, metrics, write_config

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(bool(slurm_cluster.missing()), reason=str(slurm_cluster.missing()))]
_SIZE = ["--nodes", "2", "--gpus-per-node", "0"]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with slurm_cluster.cluster() as variables, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("SLURM_")]:
            patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cluster")
    write_config(folder)
    return folder


def submit(folder: Path, name: str, *overrides: str) -> str:
    done = automodel(folder, "submit", "-c", "tiny.yaml", *_SIZE, f"run_name={name}", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"runs/{name}/job.sbatch" in done.stdout and "scancel" in done.stdout
    return re.search(r"job (\d+): 2 nodes x 1 rank\n", done.stdout)[1]  # type: ignore[index]


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout


def field(job: str, name: str) -> str:
    return re.search(rf"\b{name}=(\S+)", slurm("scontrol", "show", "job", job))[1]  # type: ignore[index]


def log(run: Path) -> str:
    path = run / "logs" / "rank-0.log"
    return path.read_text() if path.exists() else "(no log)"


def wait(run: Path, what: str, ready: Callable[[], bool], seconds: float = 240) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:g} s\n{slurm('squeue')}{log(run)}"
        time.sleep(0.05)


def step(run: Path) -> int:
    return max((row["step"] for row in metrics(run)), default=0) if (run / "metrics.jsonl").exists() else 0


def ended(job: str) -> bool:
    return field(job, "JobState") in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def wait_for_end(run: Path, job: str) -> str:
    wait(run, f"end of job {job}", lambda: ended(job))
    return field(job, "JobState")


def test_a_preempted_job_is_requeued_and_goes_on_bitwise(folder: Path) -> None:
    whole, cut = folder / "runs" / "whole", folder / "runs" / "cut"
    more = ("train.max_steps=30", "checkpoint.every=12", "logging.report=false")
    job = submit(folder, "whole", *more)
    assert wait_for_end(whole, job) == "COMPLETED", log(whole)

    job = submit(folder, "cut", *more)
    wait(cut, "step 3", lambda: step(cut) >= 3)
    slurm("scancel", "--batch", "--signal=USR1", job)  # what --signal=B:USR1 does before the time limit
    wait(cut, "requeue", lambda: field(job, "Restarts") == "1" and field(job, "JobState") == "PENDING")
    saved = step(cut)
    assert saved < 30 and (cut / "checkpoints" / f"step-{saved:06d}").is_dir()
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm lets a requeued job wait two minutes
    assert wait_for_end(cut, job) == "COMPLETED", log(cut)

    text = log(cut)
    assert "requeued 0 of at most 20 times" in text and "requeued 1 of at most 20 times" in text
    assert f"from step {saved}" in text and text.rstrip().endswith("done")
    assert (cut / "logs" / "rank-1.log").exists() and not list((folder / "runs").glob("cut-*"))
    assert [row["step"] for row in metrics(cut) if "loss" in row] == list(range(1, 31))
    for key in ("loss", "grad_norm", "lr", "num_label_tokens", "val_loss"):
        assert curve(cut, key) == curve(whole, key)
    weights = [(run / "export" / "model.safetensors").read_bytes() for run in (whole, cut)]
    assert weights[0] == weights[1]
