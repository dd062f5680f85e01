"""Copies of runs at URLs, without a run."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.run.remote import remote_sync as mirror_module
from automodel_cli.run.remote.remote_storage import fetch
from automodel_cli.run.remote.remote_sync import Mirror, claim, mirrored
from automodel_cli.run.run_directory import new_run_folder, runs_called
from automodel_cli.training.checkpoint.directory import CheckpointDir
from tests.errors import assert_error, raises


def _checkpoint(run: Path, step: int, val_loss: float | None = None) -> None:
    checkpoints = CheckpointDir(run / "checkpoints")
    written = checkpoints.path / f"step-{step:06d}.tmp-x"
    written.mkdir(parents=True)
    (written / "weights").write_bytes(content := os.urandom(100))
    final = checkpoints.path / f"step-{step:06d}"
    checkpoints.publish(written, final, {"metrics": {"val_loss": val_loss}, "files": {"weights": content.hex()}})
    checkpoints.link_if_best(final, val_loss)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "mine"
    (run / "logs").mkdir(parents=True)
    (run / "config.yaml").write_text("seed: 0\n")
    (run / "metrics.jsonl").write_text("{}\n")
    return run


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_newest_and_best_come_back_and_half_a_checkpoint_does_not(run: Path, tmp_path: Path) -> None:
    url, bucket = f"file://{tmp_path}/bucket/mine", tmp_path / "bucket" / "mine"
    claim(run, url)
    for step, loss in ((2, 3.0), (4, 1.0), (6, 2.0), (8, 2.0)):
        _checkpoint(run, step, loss)
    (run / "checkpoints" / "step-000010.tmp-y").mkdir()
    with mirrored(run, url, 2) as notify:
        notify()
    assert {p.name for p in bucket.glob("checkpoints/*")} == {"best", "step-000004", "step-000006", "step-000008"}
    (bucket / "checkpoints" / "step-000010").mkdir()  # an upload that was cut off: no metadata
    (bucket / "checkpoints" / "step-000010" / "weights").write_bytes(b"half")

    back = fetch(url, ["checkpoint"])
    assert back != run
    assert {p.name for p in back.glob("checkpoints/*")} == {"best", "step-000004", "step-000008"}
    assert CheckpointDir(back / "checkpoints").best() == back / "checkpoints" / "step-000004"
    for name in ("step-000004", "step-000008"):
        assert _contents(back / "checkpoints" / name) == _contents(run / "checkpoints" / name)
    assert (back / "metrics.jsonl").read_text() == "{}\n"
    claim(back, url)
    with mirrored(back, url, 2):
        pass
    assert {p.name for p in bucket.glob("checkpoints/step-*")} == {"step-000004", "step-000006", "step-000008"}


def test_metadata_is_written_last_and_removed_first(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, done = f"file://{tmp_path}/bucket/mine", []
    claim(run, url)
    _checkpoint(run, 2)
    for name in ("upload", "write", "remove"):
        original = getattr(mirror_module.Remote, name)

        def noted(self, *arguments, name=name, original=original):
            done.append((name, next(a for a in arguments if isinstance(a, str))))
            return original(self, *arguments)

        monkeypatch.setattr(mirror_module.Remote, name, noted)
    with mirrored(run, url, None):
        pass
    at = "checkpoints/step-000002"
    assert done[-2:] == [("upload", f"{at}/weights"), ("write", f"{at}/meta.json")]
    done.clear()
    _checkpoint(run, 2)  # the same step again, by a run that went back
    with mirrored(run, url, None):
        pass
    assert [entry for entry in done if at in entry[1]] == [
        ("remove", f"{at}/meta.json"),
        ("upload", f"{at}/weights"),
        ("write", f"{at}/meta.json"),
    ]
    bucket = tmp_path / "bucket" / "mine" / at
    assert _contents(bucket) == _contents(run / at)


def test_a_failing_copy_is_said_once_and_loses_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/bucket/mine"
    monkeypatch.setattr(mirror_module, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(mirror_module, "_LAST_TRIES", (0.01, 0.01))
    claim(run, url)
    (tmp_path / "bucket" / "mine").rename(tmp_path / "gone")
    (tmp_path / "bucket" / "mine").write_text("no folder")
    tries = []
    original = Mirror._copy
    several = threading.Event()

    def counted(self: Mirror) -> None:
        tries.append(1)
        if len(tries) > 3:
            several.set()
        original(self)

    monkeypatch.setattr(Mirror, "_copy", counted)
    with pytest.raises(RunError) as error, mirrored(run, url, None) as notify:
        notify()
        assert several.wait(10)
    assert_error(error.value, "server_unreachable", "output_dir", values=("2 files of 0.00 GiB", url, run))
    assert f"fix   automodel resume {run} " in str(error.value)
    assert capsys.readouterr().err.count("will be retried") == 1

    several.clear()
    tries.clear()
    with mirrored(run, url, None) as notify:  # and one that comes back
        notify()
        assert several.wait(10)
        (tmp_path / "bucket" / "mine").unlink()
    assert "work again" in capsys.readouterr().err
    assert (tmp_path / "bucket" / "mine" / "metrics.jsonl").read_text() == "{}\n"


def test_a_run_that_fails_fails_for_its_own_reason(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), mirrored(run, f"file://{tmp_path}/bucket/mine", None):
        1 / 0  # noqa: B018
    assert json.loads((tmp_path / "bucket" / "mine" / "metrics.jsonl").read_text()) == {}


def test_another_run_and_a_later_state_are_not_overwritten(run: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/bucket/mine"
    claim(run, url)
    _checkpoint(run, 2)
    with mirrored(run, url, None):
        pass
    other = tmp_path / "runs" / "other"
    other.mkdir()
    (other / "config.yaml").write_text("seed: 1\n")
    with raises(RunError, "resume_conflict", keys=("output_dir",), values=(url, other)):
        claim(other, url)
    (run / "checkpoints" / "step-000002").rename(tmp_path / "lost")
    with raises(RunError, "resume_conflict", keys=("checkpoint.resume",), values=(url, "step-000002", run)):
        claim(run, url)
    assert (tmp_path / "bucket" / "mine" / "config.yaml").read_text() == "seed: 0\n"
    with raises(ConfigError, "run_not_found", values=(f"file://{tmp_path}/bucket/yours", "mine")):
        fetch(f"file://{tmp_path}/bucket/yours")


def test_names_taken_elsewhere_are_taken(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    taken = ["a-2", "a-10", "b"]
    assert new_run_folder(tmp_path, "a", taken=taken).name == "a-3"
    assert new_run_folder(tmp_path, "b", taken=taken).name == "b-2"
    assert [p.name for p in runs_called(tmp_path, "a", taken)] == ["a", "a-2", "a-3", "a-10"]
