"""Several launchers, as on several nodes: the numbers of one process, and what a user sees when a worker dies."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.command import automodel, curve, environment, metrics, write_config
from tests.errors import assert_error

_RUN = ("finetune", "llm", "-c", "tiny.yaml", "train.max_steps=8", "logging.report=false")
_SECONDS = 500
"""For a busy machine; 20 to 60 s otherwise."""


@contextmanager
def launchers(folder: Path, *arguments: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two `torchrun --nnodes 2` of one rank each, which meet on localhost."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--rdzv-id=nodes"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "-m", "automodel_cli", *arguments]
    environ = environment(folder) | {"AUTOMODEL_LOG_DIR": str(folder / "logs")}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    nodes = [subprocess.Popen(command, cwd=folder, env=environ, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    try:
        yield nodes
    finally:  # after a failure: TERM makes a launcher end its workers
        for node in nodes:
            node.terminate()
            node.wait(60)


@pytest.mark.slow
def test_two_torchrun_launchers_give_the_numbers_of_one_process(tmp_path: Path) -> None:
    write_config(tmp_path)
    alone = automodel(tmp_path, *_RUN, "run_name=alone")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    with launchers(tmp_path, *_RUN, "run_name=nodes") as nodes:
        output = [node.communicate(timeout=_SECONDS)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], output
    runs = tmp_path / "runs"
    assert sorted(path.name for path in runs.iterdir()) == ["alone", "nodes"], "both nodes write into one folder"
    for key, tolerance in (("loss", 1e-5), ("val_loss", 1e-5), ("grad_norm", 1e-4)):
        assert curve(runs / "nodes", key) == pytest.approx(curve(runs / "alone", key), rel=tolerance)
    assert curve(runs / "nodes", "num_label_tokens") == curve(runs / "alone", "num_label_tokens")
    assert sum("step 8/8" in text for text in output) == 1, "rank 0 speaks for all"


@pytest.mark.slow
def test_a_killed_worker_is_named_and_costs_the_steps_since_the_last_checkpoint(tmp_path: Path) -> None:
    write_config(tmp_path)
    run = tmp_path / "runs" / "lost"
    deadline = time.monotonic() + _SECONDS
    with launchers(tmp_path, *_RUN, "train.max_steps=4000", "checkpoint.every=3", "run_name=lost") as nodes:
        while not _saved_steps(run):
            assert time.monotonic() < deadline and not any(node.poll() for node in nodes)
            time.sleep(0.05)
        os.kill(_worker_of_rank(nodes, 1), signal.SIGKILL)
        output = "".join(node.communicate(timeout=_SECONDS)[0] for node in nodes)
    assert all(node.returncode != 0 for node in nodes), output
    assert_error(output, "rank_failure", values=("rank 0 of 2",))
    saved = max(_saved_steps(run))
    resumed = automodel(tmp_path, "resume", "runs/lost", "mesh.dp_size=2", f"train.max_steps={saved + 2}")
    assert resumed.returncode == 0 and f"from step {saved}" in resumed.stdout, resumed.stdout + resumed.stderr
    assert [row["step"] for row in metrics(run) if "loss" in row] == list(range(1, saved + 3))


def _saved_steps(run: Path) -> list[int]:
    """Of whole checkpoints: one that is being written has a longer name."""
    names = [path.name.removeprefix("step-") for path in run.glob("checkpoints/step-*")]
    return [int(name) for name in names if name.isdigit()]


def _worker_of_rank(nodes: list[subprocess.Popen[str]], rank: int) -> int:
    """The process that has RANK in its environment, below one of the launchers."""
    launcher_pids = {node.pid for node in nodes}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        parent = int(stat.read_text().rpartition(")")[2].split()[1])
        environ = (stat.parent / "environ").read_bytes() if parent in launcher_pids else b""
        if f"RANK={rank}".encode() in environ.split(b"\0"):
            return int(stat.parent.name)
    raise AssertionError(f"no process of rank {rank}")
