"""Somebody else's YAML, checkpoint and completion, through the real command line: nothing of theirs is executed, and
the answer says what it was. (Completions: tests/unit/rollout/rewards/sandbox/test_host.py.)"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
from torch.distributed.checkpoint import FileSystemReader

from automodel_cli.data.storage.checksums import content_hash
from automodel_cli.training.checkpoint import directory as checkpoint_directory
from automodel_cli.training.checkpoint.directory import read_meta
from tests.e2e.command import automodel, write_config
from tests.unit.training.test_torch_compat import Runs, touch

YAML = """
defaults: [grpo, override /rollout: vllm, _self_]
model: {pretrained: model, trust_remote_code: true}
data: {path: prompts.jsonl, seq_len: 2048}
rewards: {exact: {_target_: automodel_cli.rollout.rewards.text.ExactAnswer}}
rollout: {engine: {url: "http://127.0.0.1:1", command: [touch, pwned-by-command]}}
"""
REMOTE_CODE = "from pathlib import Path\nPath('pwned-by-remote-code').touch()\n"


def test_a_hostile_yaml_and_model_folder(tmp_path: Path) -> None:
    (tmp_path / "hostile.yaml").write_text(YAML)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    (tmp_path / "model").mkdir()
    automap = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": automap}))
    (tmp_path / "model" / "evil.py").write_text(REMOTE_CODE)
    run = automodel(tmp_path, "grpo", "llm", "-c", "hostile.yaml")
    assert run.returncode == 2 and "2 errors in hostile.yaml, nothing was started" in run.stderr
    assert "fix  --trust remote-code   (if you trust it)" in run.stderr and "fix  --trust command" in run.stderr
    check = automodel(tmp_path, "check", "-c", "hostile.yaml")
    assert check.returncode == 0 and "a run needs --trust command\n" in check.stdout
    assert "model.trust_remote_code=true (hostile.yaml:3) runs Python code that comes with the model" in check.stdout
    plan = automodel(tmp_path, "plan", "-c", "hostile.yaml", "--gpus", "1")
    assert plan.returncode == 2 and "a run needs --trust remote-code\n" in plan.stdout
    assert "contains custom code" in plan.stderr
    assert not list(tmp_path.glob("pwned*"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps whose config reads a secret, with a tracker and two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    conf = write_config(folder)
    conf.write_text(
        conf.read_text() + "logging: {trackers: [tensorboard], report: true}\nseed: '${oc.decode:${oc.env:A_SEED}}'\n"
    )
    os.environ.update(A_SEED="918273645")
    try:
        done = automodel(folder, "tiny.yaml", "train.max_steps=4", "checkpoint.every=2", "output_dir=runs")
        assert done.returncode == 0, done.stderr
        again = automodel(folder, "resume", "tiny", "train.max_steps=5", "train.extend_schedule=stretch")
        assert again.returncode == 0, again.stderr
    finally:
        del os.environ["A_SEED"]
    return folder / "runs" / "tiny"


@pytest.mark.slow
def test_nothing_that_a_run_leaves_holds_a_value_of_the_environment(trained: Path) -> None:
    events = list(trained.glob("tensorboard/*"))
    assert events and b"${oc.env:A_SEED}" in events[0].read_bytes()
    left = {path.name for path in trained.rglob("*") if path.is_file() and b"918273645" in path.read_bytes()}
    assert left <= {"meta.json"}, "a checkpoint holds the seed: it is the state of the run itself"


@pytest.mark.slow
def test_links_that_somebody_puts_into_a_run_folder_lead_nowhere(trained: Path, tmp_path: Path) -> None:
    """The run goes on with what it replaces, and refuses what it would have to write through."""
    run, victim = tmp_path / "runs" / "tiny", tmp_path / "victim"
    shutil.copytree(trained, run, symlinks=True)
    victim.write_text("mine")
    for name in (
        "metrics.jsonl",
        "metrics.jsonl.tmp",
        "run.json",
        "run.json.tmp",
        "loss.svg",
        "trust.json",
        "schedule.svg",
    ):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(victim)
    go_on = ("resume", "tiny", "train.max_steps=7", "seed=918273645", "mesh.dp_size=2")
    for name in (".lock", "logs/rank-1.log", "logs/rank-0.stacks"):
        kept = run / f"{name}.kept"
        kept.parent.mkdir(exist_ok=True)
        if (run / name).exists():
            (run / name).rename(kept)
        (run / name).symlink_to(victim)
        refused = automodel(tmp_path, *go_on)
        assert refused.returncode != 0 and f"{name} is a symbolic link" in refused.stderr, refused.stderr
        (run / name).unlink()
        if kept.exists():
            kept.rename(run / name)
    done = automodel(tmp_path, *go_on)
    assert done.returncode == 0, done.stderr
    assert victim.read_text() == "mine" and not (run / "loss.svg").is_symlink()


@pytest.mark.slow
def test_a_hostile_checkpoint(trained: Path) -> None:
    os.environ["A_SEED"] = "918273645"
    newest = sorted((trained / "checkpoints").glob("step-*"))[-1]
    path, marker = newest / ".metadata", trained / "pwned"
    metadata = FileSystemReader(newest).read_metadata()
    metadata.planner_data = Runs(touch, str(marker))
    path.write_bytes(pickle.dumps(metadata))
    meta = read_meta(newest)  # whoever writes a checkpoint writes its checksums too
    meta["files"][".metadata"] = {"bytes": path.stat().st_size, "xxh3": content_hash(path)}
    checkpoint_directory._write_meta(newest / checkpoint_directory.META, meta)
    try:
        words = ("train.max_steps=6", "train.extend_schedule=stretch", f"checkpoint.resume={newest}")
        done = automodel(trained.parents[1], "resume", "tiny", *words)
    finally:
        del os.environ["A_SEED"]
    assert done.returncode != 0 and not marker.exists()
    assert "touch, which describes no tensor" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
