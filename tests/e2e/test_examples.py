"""The files under `examples/` as a user runs them: copied into a folder of their own, reached by `--trust-package`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.command import automodel, curve, write_config
from tests.e2e.test_dpo import PAIRS
from tests.e2e.test_grpo import TINY as GRPO

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: the examples and a small SFT config, and the run that they are compared with."""
    folder = tmp_path_factory.mktemp("examples")
    for file in filter(Path.is_file, EXAMPLES.iterdir()):
        shutil.copy(file, folder)
    config = write_config(folder)
    start, _, rest = config.read_text().partition("parallelizer:")
    config.write_text(start + rest.partition("\n")[2].partition("\n")[2])  # its options are those of fsdp2
    done = automodel(folder, "finetune", "llm", "-c", "tiny.yaml", "run_name=library", "parallelizer=ddp", *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


SHORT = ("train.max_steps=6", "logging.report=false")


def test_own_parallelizer_trains_the_same_curve(folder: Path) -> None:
    own = "parallelizer._target_=own_parallelizer.FlatAllReduce"
    run = ("finetune", "llm", "-c", "tiny.yaml", "run_name=own", "mesh.dp_size=2", own, *SHORT)
    refused = automodel(folder, *run)
    assert "--trust-package own_parallelizer" in refused.stdout + refused.stderr
    done = automodel(folder, *run, "--trust-package", "own_parallelizer")
    assert done.returncode == 0, done.stdout + done.stderr
    for key in ("loss", "grad_norm"):
        assert curve(folder / "runs" / "own", key) == pytest.approx(curve(folder / "runs" / "library", key), rel=1e-5)


def test_own_preference_objective_learns(folder: Path) -> None:
    (folder / "pairs.yaml").write_text(PAIRS.format(family="llama"))
    own = ("objective._target_=own_preference.MarginHinge", "--trust-package", "own_preference")
    few = ("train.max_steps=6", "logging.report=false", "data.seq_len=96", "optimizer.lr=1e-2")
    done = automodel(folder, "dpo", "llm", "-c", "pairs.yaml", "run_name=preference", *few, *own)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = curve(folder / "runs" / "preference")
    assert losses[-1] < losses[0]


def test_own_policy_objective_learns_on_its_own_samples(folder: Path) -> None:
    (folder / "rollouts.yaml").write_text(GRPO.format(family="llama").replace("objective: {kl_coef: 0.02}\n", ""))
    own = ("objective._target_=own_policy.ClippedReinforce", "--trust-package", "own_policy")
    one_update = ("train.max_steps=3", "train.global_batch_size=16", "logging.report=false")
    done = automodel(folder, "grpo", "llm", "-c", "rollouts.yaml", "run_name=policy", *one_update, *own)
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(norm > 0 for norm in curve(folder / "runs" / "policy", "grad_norm"))


def test_own_dataset_optimizer_schedule_and_callback_in_one_run(folder: Path) -> None:
    own = {
        "data.generator": "{_target_: own_dataset.Backwards, number: 60}",
        "optimizer": "{_target_: own_optimizer.Lion, lr: 2e-3}",
        "lr_scheduler": "{_target_: own_schedule.Milestones, at: [0.5]}",
        "callbacks": "[{_target_: own_callback.BestLoss}]",
    }
    overrides = ["~data.generator", "~optimizer", "~lr_scheduler", *(f"{key}={value}" for key, value in own.items())]
    trust = [f"--trust-package=own_{name}" for name in ("dataset", "optimizer", "schedule", "callback")]
    done = automodel(folder, "finetune", "llm", "-c", "tiny.yaml", "run_name=four", *SHORT, *overrides, *trust)
    assert done.returncode == 0, done.stdout + done.stderr
    run = folder / "runs" / "four"
    losses = curve(run)
    assert min(losses[1:]) < losses[0]
    assert curve(run, "lr") == pytest.approx([2e-3] * 3 + [2e-4] * 3)
    assert curve(run, "best_loss") == [min(losses[: i + 1]) for i in range(6)]
    assert (run / "best.txt").read_text().splitlines()[-1].endswith(f" {min(losses)}")
    assert "accuracy after training" in done.stdout and f"best loss {min(losses):.4f}" in done.stdout


def test_own_format_and_tracker_in_one_run(folder: Path) -> None:
    trust = [f"--trust-package=own_{name}" for name in ("format", "tracker")]
    few = ("train.max_steps=3", "logging.report=false", "logging.trackers=[{_target_: own_tracker.Spreadsheet}]")
    done = automodel(folder, "finetune", "llm", "-c", "own_format.yaml", "run_name=threads", *few, *trust)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "threads.jsonl: 8 rows (own_format.BestAnswer)" in done.stdout
    lines = (folder / "runs" / "threads" / "curve.csv").read_text().splitlines()
    losses = [float(line.split(",")[2]) for line in lines if line.split(",")[1] == "loss"]
    assert losses == curve(folder / "runs" / "threads") and lines[-1] == "end,succeeded,True"
    shown = automodel(folder, "data", "inspect", "-c", "own_format.yaml", "--rows", "1", *trust)
    assert "Capital of France?" in shown.stdout and "{Paris" in shown.stdout and "Lyon" not in shown.stdout


def test_own_format_of_pairs(folder: Path) -> None:
    own = ("~data.generator", "data.path=threads.jsonl", "data.format={_target_: own_format.BestAndWorst}")
    few = ("train.max_steps=2", "logging.report=false", "data.seq_len=128", "data.column_mapping={body: text}")
    (folder / "pairs.yaml").write_text(PAIRS.format(family="llama"))
    run = ("dpo", "llm", "-c", "pairs.yaml", "run_name=threads_dpo", *few, *own, "--trust-package", "own_format")
    done = automodel(folder, *run)
    assert done.returncode == 0, done.stdout + done.stderr
    assert curve(folder / "runs" / "threads_dpo")[0] == pytest.approx(0.693147, abs=1e-6)


def test_own_engine_reward_and_environment_in_one_run(folder: Path) -> None:
    (folder / "turns.yaml").write_text(GRPO.format(family="llama").replace("objective: {kl_coef: 0.02}\n", ""))
    own = [
        "rollout.engine={_target_: own_engine.WholeSequence, max_tokens: 6}",
        "+rewards.vowels={_target_: own_reward.Vowels, weight: 0.5}",
        "rollout.environment={_target_: own_environment.SayMore, max_turns: 2}",
        "rollout.advantage_estimator={_target_: own_advantages.Ranks}",
    ]
    trust = [f"--trust-package=own_{name}" for name in ("engine", "reward", "environment", "advantages")]
    few = ("train.max_steps=2", "train.global_batch_size=16", "logging.report=false", "data.seq_len=128")
    done = automodel(folder, "grpo", "llm", "-c", "turns.yaml", "run_name=turns", *few, *own, *trust)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = [json.loads(line) for line in (folder / "runs" / "turns" / "rollouts.jsonl").read_text().splitlines()]
    for sample in samples:
        letters = [letter for letter in sample["completion"].lower() if letter.isalpha()]
        vowels = sum(letter in "aeiou" for letter in letters) / max(len(letters), 1)
        assert sample["parts"]["vowels"] == pytest.approx(vowels)
        assert sample["num_tokens"] <= 2 * 6
        assert -1 <= sample["advantage"] <= 1
    assert any(sample["parts"]["environment"] > 0 for sample in samples)
    for error in curve(folder / "runs" / "turns", "token_mult_prob_error"):
        assert error == pytest.approx(1.0, abs=1e-5)  # the trainer's own forward agrees with the engine's log-probs


def test_a_node_that_is_no_engine_is_told_what_it_lacks(folder: Path) -> None:
    (folder / "turns.yaml").write_text(GRPO.format(family="llama"))
    own = ("rollout.engine={_target_: own_reward.Vowels}", "--trust-package=own_reward")
    done = automodel(folder, "check", "-c", "turns.yaml", *own)
    assert (
        done.returncode == 2 and "which lacks build, capabilities of automodel_cli.rollout.engines.base" in done.stderr
    )
