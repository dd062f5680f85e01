"""Runs whose data are read while they train, from an S3 server: killed, resumed, on another number of ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tests.e2e.command import TINY, automodel, curve, environment, start_cold
from tests.errors import assert_error
from tests.object_storage import s3_bucket

pytestmark = pytest.mark.slow

STEPS = ("train.max_steps=60", "checkpoint.every=10", "logging.report=false", "data.streaming.block_rows=8")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_bucket(monkeypatch) as bucket:
        yield bucket


def corpus(fs: fsspec.AbstractFileSystem, folder: str) -> None:
    """Eight files of 40 chats each."""
    for number in range(8):
        chats = [
            [{"role": "user", "content": f"{number}, {i}?"}, {"role": "assistant", "content": "yes " * (1 + i % 9)}]
            for i in range(40)
        ]
        lines = "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
        fs.pipe(f"{folder}/{number}.jsonl", lines.encode())


def config(folder: Path, path: str) -> None:
    kept = [line for line in TINY.format(family="llama").splitlines() if "ChatTasks" not in line]
    kept.insert(kept.index("data:") + 1, f"  path: {path}\n  streaming: {{}}")
    (folder / "tiny.yaml").write_text("\n".join(kept))


def rank_1(process: subprocess.Popen[str], metrics: Path, steps: int) -> int:
    """The process of rank 1, once `steps` steps are recorded."""
    deadline = time.monotonic() + 200
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= steps):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    return next(int(pid) for pid in children if "RANK=1" in Path(f"/proc/{pid}/environ").read_text().split("\0"))


def test_killed_and_resumed_on_two_ranks_and_on_one(tmp_path: Path, s3: str) -> None:
    corpus(fsspec.filesystem("s3"), f"{s3}/rows")
    config(tmp_path, f"{s3}/rows")
    whole = automodel(tmp_path, "finetune", "llm", "-c", "tiny.yaml", "run_name=whole", "mesh.dp_size=2", *STEPS)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    killed = start_cold(tmp_path, "finetune", "llm", "-c", "tiny.yaml", "run_name=killed", "mesh.dp_size=2", *STEPS)
    run = tmp_path / "runs/killed"
    os.kill(rank_1(killed, run / "metrics.jsonl", 14), signal.SIGKILL)
    assert killed.communicate(timeout=120) and killed.returncode
    assert not (run / "export").exists(), "it was killed too late to show anything"
    shutil.copytree(run, tmp_path / "runs/one")
    done = automodel(tmp_path, "resume", "runs/killed")
    assert done.returncode == 0, done.stdout + done.stderr
    want = tmp_path / "runs/whole"
    assert curve(run) == curve(want) and len(curve(run)) == 60
    name = "export/model.safetensors"
    assert (run / name).read_bytes() == (want / name).read_bytes()
    done = automodel(tmp_path, "resume", "runs/one", "mesh.dp_size=1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert curve(tmp_path / "runs/one") == pytest.approx(curve(want), rel=1e-5)
    assert not list((tmp_path / "cache").glob("*/*.jsonl")), "nothing is downloaded"


def test_commands_of_a_stream(tmp_path: Path) -> None:
    """`check`, `plan` and `data inspect` work; `data prepare` and a run without a length are refused."""
    (tmp_path / "rows").mkdir()
    corpus(fsspec.filesystem("file"), str(tmp_path / "rows"))
    config(tmp_path, "rows")
    done = automodel(tmp_path, "check", "-c", "tiny.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    done = automodel(tmp_path, "data", "inspect", "-c", "tiny.yaml", "--rows", "1")
    assert done.returncode == 0 and "{yes " in done.stdout, done.stdout + done.stderr
    done = automodel(tmp_path, "plan", "-c", "tiny.yaml", "--gpus", "2", "mesh.dp_size=2")
    assert done.returncode == 0, done.stdout + done.stderr
    for more, code in (
        (("data", "prepare", "-c", "tiny.yaml"), "no_effect"),
        (("check", "-c", "tiny.yaml", "train.max_steps=null", "train.epochs=1"), "requires_setting"),
        (("check", "-c", "tiny.yaml", "data.streaming.lanes=3"), "not_divisible"),
        (("check", "-c", "tiny.yaml", "mesh.dp_size=4", "data.streaming.lanes=2"), "not_divisible"),
        (("check", "-c", "tiny.yaml", "data.validation_size=0.1"), "unsupported_combination"),
        (("check", "-c", "tiny.yaml", "data.num_workers=2"), "no_effect"),
        (("check", "-c", "tiny.yaml", "data.streaming.lane=2"), "unknown_key"),
    ):
        done = automodel(tmp_path, *more)
        assert done.returncode
        assert_error(done.stdout + done.stderr, code)


SLOW_PREPARATION = """
import sys, time
from pathlib import Path
from automodel_cli.data.preparation import token_shards
from automodel_cli.data.sources import spans
spans.SHARD_BYTES = 1500
write = token_shards.TokenShards._write
metrics = Path("runs/beside/metrics.jsonl")
def slowly(self, folder, of_shard):
    if folder.name.startswith("000004"):
        while not metrics.exists() or not metrics.read_bytes().count(b"\\n"):
            time.sleep(0.1)
        time.sleep(2)
    write(self, folder, of_shard)
token_shards.TokenShards._write = slowly
from automodel_cli.cli.main import run
sys.exit(run(["data", "prepare", "-c", "tiny.yaml"]))
"""


def test_a_run_beside_the_preparation_of_its_data(tmp_path: Path) -> None:
    """It starts with the first shards, waits for the others, and trains as a run on complete shards."""
    (tmp_path / "rows").mkdir()
    corpus(fsspec.filesystem("file"), str(tmp_path / "rows"))
    config(tmp_path, "rows\n  start_after: 2")
    steps = ("train.max_steps=40", "checkpoint.every=10", "logging.report=false", "data.streaming.block_rows=8")
    command = [sys.executable, "-c", SLOW_PREPARATION]
    preparation = subprocess.Popen(command, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, text=True)
    beside = automodel(tmp_path, "finetune", "llm", "-c", "tiny.yaml", "run_name=beside", *steps)
    output, _ = preparation.communicate(timeout=120)
    assert preparation.returncode == 0 and "all shards" in output
    assert beside.returncode == 0, beside.stdout + beside.stderr
    metrics = [json.loads(line) for line in (tmp_path / "runs/beside/metrics.jsonl").read_text().splitlines()]
    assert max(row.get("data_wait_share") or 0 for row in metrics) > 0.1
    done = automodel(tmp_path, "finetune", "llm", "-c", "tiny.yaml", "run_name=after", "mesh.dp_size=2", *steps)
    assert done.returncode == 0, done.stdout + done.stderr
    assert curve(tmp_path / "runs/after") == pytest.approx(curve(tmp_path / "runs/beside"), rel=1e-5)
