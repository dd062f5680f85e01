"""Runs whose `output_dir` is a URL: a folder behind `file://`, and an S3 server where moto and s3fs are installed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from tests.e2e.command import automodel, curve, start, write_config
from tests.errors import assert_error
from tests.object_storage import s3_bucket

pytestmark = pytest.mark.slow

MORE = ["train.max_steps=16", "checkpoint.every=2", "logging.report=false", "data.generator.num_train=40"]
TRAIN = ["finetune", "llm", "-c", "tiny.yaml", *MORE]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_bucket(monkeypatch) as bucket:
        yield f"{bucket}/runs"


def _wait_for_whole_checkpoint(process, url: str) -> None:
    fs, path = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    deadline = time.monotonic() + 120
    while not fs.glob(f"{path}/checkpoints/step-*/meta.json"):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _killed_deleted_and_resumed(folder: Path, url: str) -> None:
    """Its losses and its export are those of a run on this disk that nobody disturbed, to the last bit."""
    write_config(folder)
    done = automodel(folder, *TRAIN, "run_name=whole")
    assert done.returncode == 0, done.stdout + done.stderr
    killed = start(folder, *TRAIN, "run_name=killed", f"output_dir={url}")
    _wait_for_whole_checkpoint(killed, f"{url}/killed")
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert not list(folder.glob("runs/*/killed/export")), "it was killed too late to show anything"
    whole = folder / "elsewhere"
    shutil.move(folder / "runs" / "whole", whole)
    shutil.rmtree(folder / "runs")
    done = automodel(folder, "resume", f"{url}/killed")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"uploaded to {url}/killed" in done.stdout
    (run,) = folder.glob("runs/*/killed")
    assert curve(run) == curve(whole) and len(curve(run)) == 16
    weights = (whole / "export" / "model.safetensors").read_bytes()
    fs, path = fsspec.core.url_to_fs(f"{url}/killed", skip_instance_cache=True, use_listings_cache=False)
    assert fs.cat_file(f"{path}/export/model.safetensors") == weights
    assert fs.cat_file(f"{path}/metrics.jsonl") == (run / "metrics.jsonl").read_bytes()
    assert b'"finished"' in fs.cat_file(f"{path}/run.json")
    _lists_and_shows(folder, url, run)
    steps = sorted(name.split("/")[-2] for name in fs.glob(f"{path}/checkpoints/step-*/meta.json"))
    assert steps[-3:] == ["step-000012", "step-000014", "step-000016"] and len(steps) <= 4  # three and the best


def _lists_and_shows(folder: Path, url: str, run: Path) -> None:
    """From elsewhere, what is said of the runs at the URL is what is said of them here."""
    home = folder / "another_machine"
    home.mkdir()
    here = json.loads(automodel(folder, "runs", "ls", str(run.parent), "--json").stdout)
    listed = automodel(home, "runs", "ls", url, "--json")
    there = json.loads(listed.stdout)
    assert there["folder"] == f"{url}/killed" and here["state"] == "finished"
    same = {key: value for key, value in here.items() if key not in ("folder", "age_seconds")}
    assert {key: there[key] for key in same} == same and not (home / "runs").exists()
    assert abs(there["age_seconds"] - here["age_seconds"]) < 60
    assert "killed  " in automodel(home, "runs", "ls", url).stdout
    written = automodel(home, "report", url)
    assert "<h1>killed" in (home / written.stdout.strip()).read_text(), written.stderr


def test_a_run_that_lost_its_disk_goes_on_from_its_url(tmp_path: Path) -> None:
    _killed_deleted_and_resumed(tmp_path, f"file://{tmp_path}/bucket")


def test_a_run_that_lost_its_disk_goes_on_from_s3(tmp_path: Path, s3: str) -> None:
    _killed_deleted_and_resumed(tmp_path, s3)


def test_a_bucket_that_lets_nobody_write_is_refused_before_training(
    tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path)
    missing = automodel(tmp_path, *TRAIN, "output_dir=s3://nowhere/runs")
    assert missing.returncode == 1
    assert_error(missing.stderr, "server_unreachable", values=("s3://nowhere/runs/tiny",))
    monkeypatch.setattr("moto.core.responses.settings.INITIAL_NO_AUTH_ACTION_COUNT", 0)
    denied = automodel(tmp_path, *TRAIN, f"output_dir={s3}")
    assert denied.returncode == 1
    assert_error(denied.stderr, "server_unreachable", values=(s3,))
    for said in (missing, denied):
        assert "step 1/16" not in said.stdout and "try   check that the bucket exists" in said.stderr
