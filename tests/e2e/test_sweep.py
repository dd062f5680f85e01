"""`automodel sweep` as a user types it: one run for each combination, skipped where it has finished."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from automodel_cli.config.composition.compose import compose
from tests.e2e.command import automodel, curve, write_config
from tests.errors import assert_error

SWEEP = ("sweep", "-c", "tiny.yaml", "train.max_steps=3", "data.generator.num_validation=2")
RUNS = {"000-lr=0.001": "0.001", "001-lr=0.01": "0.01"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    write_config(folder)
    return folder


def test_every_combination_is_one_run_in_hydras_order(home: Path) -> None:
    said = automodel(home, *SWEEP, "optimizer.lr=1e-3,1e-2", "seed=range(0,2)", "optimizer=adamw,muon", "--dry-run")
    lines = [shlex.split(line) for line in said.stdout.splitlines()]
    found = [tuple(word for word in line if word.startswith(("optimizer", "seed="))) for line in lines]
    assert found[:3] == [
        ("optimizer.lr=0.001", "seed=0", "optimizer=adamw"),
        ("optimizer.lr=0.001", "seed=0", "optimizer=muon"),
        ("optimizer.lr=0.001", "seed=1", "optimizer=adamw"),
    ]
    assert len(set(found)) == 8 and not (home / "runs").exists()


def test_lines_of_a_dry_run_can_be_read_and_pasted(home: Path) -> None:
    own = ("data.ignored_columns=['a b']", "--trust", "remote-code")
    said = automodel(home, *SWEEP, "seed=0,1", *own, "--name", "my new", "--dry-run")
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["new", "new"]
    assert "'\"'" not in said.stdout and '"\'"' not in said.stdout, "a quote within quotes"
    for number, line in enumerate(lines):
        command = line.removeprefix("new").strip()
        shell = ["bash", "-c", f"printf '%s\\0' {command}"]
        words = subprocess.run(shell, capture_output=True, text=True, check=True).stdout.split("\0")[:-1]
        assert words[:7] == ["automodel", "finetune", "llm", "-c", "tiny.yaml", "--trust", "remote-code"]
        tree = compose(home / "tiny.yaml", words[7:]).tree
        assert tree["seed"] == number and tree["data"]["ignored_columns"] == ["a b"]
        assert (tree["output_dir"], tree["run_name"]) == ("runs/my new", f"00{number}-seed={number}")


@pytest.mark.parametrize(
    ("words", "code", "values"),
    [
        (("optimizer.lr=1e-3",), "empty_value", ()),
        (("optimizer.lr=interval(0,1)",), "invalid_override", ("optimizer.lr=interval(0,1)",)),
        (("run_name=a,b",), "unsupported_combination", ("run_name",)),
        (("optimizer.lr=1e-3,x",), "wrong_type", ("optimizer.lr", "'x'")),
        (("seed=0,1", "--nodes", "2"), "requires_setting", ("--nodes", "--slurm")),
        (("seed=0,1", "--slurm"), "requires_setting", ("--slurm", "--nodes", "--gpus-per-node")),
        (("seed=0,1", "--slurm", "--optuna", "2"), "unsupported_combination", ("--optuna", "--slurm")),
    ],
)
def test_what_cannot_run_is_refused_before_the_first_run(
    home: Path, words: tuple[str, ...], code: str, values: tuple[str, ...]
) -> None:
    refused = automodel(home, *SWEEP, *words)
    assert refused.returncode == 2
    assert_error(refused.stderr, code, values=values)
    assert not (home / "runs").exists()


@pytest.mark.slow
def test_finished_runs_are_skipped_the_best_is_on_top_and_a_run_is_the_same_as_alone(home: Path) -> None:
    done = automodel(home, *SWEEP, "optimizer.lr=1e-3,1e-2")
    assert done.returncode == 0, done.stdout + done.stderr
    sweep = home / "runs/sweep-tiny"
    losses = {name: curve(sweep / name, "val_loss")[-1] for name in RUNS}
    table = [line for line in done.stdout.splitlines() if line.startswith(tuple(RUNS))]
    assert [line.split()[0] for line in table] == sorted(losses, key=losses.__getitem__)
    assert all(line.split()[1:4] == [RUNS[line.split()[0]], "finished", "3"] for line in table)
    shutil.rmtree(sweep / "001-lr=0.01")
    kept = (sweep / "000-lr=0.001/metrics.jsonl").stat().st_mtime_ns
    again = automodel(home, *SWEEP, "optimizer.lr=1e-3,1e-2")
    assert "000-lr=0.001  finished already" in again.stdout and again.returncode == 0
    assert (sweep / "000-lr=0.001/metrics.jsonl").stat().st_mtime_ns == kept
    assert curve(sweep / "001-lr=0.01", "val_loss")[-1] == losses["001-lr=0.01"]
    other = automodel(home, *SWEEP, "optimizer.lr=1e-3,2e-2")
    assert other.returncode == 2
    assert_error(other.stderr, "resume_conflict", values=("tiny.yaml train.max_steps=3",))
    listed = automodel(home, "runs", "ls", "--json").stdout.splitlines()
    assert {json.loads(line)["folder"] for line in listed} == {f"runs/sweep-tiny/{name}" for name in RUNS}


def test_on_slurm_it_is_one_array_of_the_runs_that_are_left(home: Path) -> None:
    said = automodel(home, *SWEEP, "seed=0,1", "--name", "s", "--slurm", "--nodes", "1", "--gpus-per-node", "0",
                     "--at-once", "1", "--dry-run")  # fmt: skip
    lines = said.stdout.splitlines()
    assert lines[0] == "#!/usr/bin/env bash" and "#SBATCH --array=0-1%1" in lines, said.stderr
    assert [line.strip() for line in lines if "/runs/s/" in line] == [
        f"{home}/runs/s/000-seed=0", f"{home}/runs/s/001-seed=1"
    ]  # fmt: skip


def test_a_search_runs_what_optuna_chooses_and_goes_on(home: Path) -> None:
    pytest.importorskip("optuna")
    words = ("sweep", "-c", "tiny.yaml", "train.max_steps=1", "data.generator.num_validation=2", "--name", "search",
             "optimizer.lr=tag(log, interval(1e-4, 1e-1))", "logging.report=false")  # fmt: skip
    done = automodel(home, *words, "--optuna", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    done = automodel(home, *words, "--optuna", "2")
    assert "[2/2]" in done.stdout and "[1/2]" not in done.stdout and done.returncode == 0
    runs = sorted((home / "runs/search").glob("00*"))
    chosen = [float(yaml.safe_load((run / "config.yaml").read_text())["optimizer"]["lr"]) for run in runs]
    assert len(set(chosen)) == 2 and all(1e-4 <= lr <= 1e-1 for lr in chosen)
    best, other = sorted(runs, key=lambda run: curve(run, "val_loss")[-1])
    table = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("00")]
    assert table == [best.name, other.name]
