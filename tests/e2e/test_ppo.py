"""PPO as a user runs it: the same numbers on ranks and in stages, a critic in the export; the quickstart learns."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.command import automodel, metrics
from tests.e2e.test_grpo import TINY
from tests.marks import slow

ARGUMENTS = (
    *("objective=ppo", "rollout.advantage_estimator=critic", "rollout.group_size=1", "rollout.prompts_per_step=8"),
    *("train.max_steps=3", "logging.report=false", "optimizer.eps=1e-4", "objective.value_coef=1.0"),
)


def train(folder: Path, name: str, *overrides: str) -> list[dict]:
    done = automodel(folder, "grpo", "llm", "-c", "tiny.yaml", f"run_name={name}", *ARGUMENTS, *overrides)
    assert done.returncode == 0 and "UserWarning" not in done.stderr, done.stdout + done.stderr
    return [row for row in metrics(folder / "runs" / name) if "value_loss" in row]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ppo")
    (folder / "tiny.yaml").write_text(TINY.format(family="llama"))
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[dict]:
    return train(folder, "alone")


def test_the_critic_starts_at_0_learns_and_is_exported(folder, alone):
    assert alone[0]["value_mean"] == 0 and alone[1]["value_mean"] != 0
    assert alone[0]["advantage_mean"] == pytest.approx(0, abs=0.5) and alone[0]["num_trained_samples"] == 8
    assert load_file(folder / "runs" / "alone" / "export" / "value_head.safetensors")["weight"].abs().max() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [*slow(("mesh.dp_size=2",)), ("mesh.pp_size=2", "mesh.dp_size=1", "pipeline=1f1b")], ids=["dp2", "pp2"]
)
def test_ranks_and_stages_change_no_number(folder, alone, layout):
    rows = train(folder, layout[0].replace(".", "-").replace("=", "-"), *layout)
    for name in ("loss", "value_loss", "reward", "advantage_std", "return_mean", "grad_norm"):
        assert [row[name] for row in rows] == pytest.approx([row[name] for row in alone], rel=2e-4, abs=1e-5), name


def test_tokens_of_the_whole_step_are_the_baseline_without_a_critic(folder):
    done = automodel(
        folder, "grpo", "llm", "-c", "tiny.yaml", "run_name=batch", "objective.kl_placement=reward",
        "rollout.advantage_estimator=batch", "train.max_steps=1", "logging.report=false",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    row = next(row for row in metrics(folder / "runs" / "batch") if "advantage_max" in row)
    assert row["num_trained_samples"] == 16 and row["advantage_min"] < 0 < row["advantage_max"]


def test_a_critic_and_its_baseline_belong_together(folder):
    for overrides, fix in (
        (("objective=ppo",), "rollout.advantage_estimator=critic"),
        (("rollout.advantage_estimator=critic",), "objective=ppo"),
    ):
        done = automodel(folder, "check", "-c", "tiny.yaml", "objective.kl_coef=0.02", *overrides)
        assert done.returncode == 2 and fix in done.stderr, done.stdout + done.stderr
