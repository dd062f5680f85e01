"""Runs that train on chosen samples: which ones, and what their first loss must be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import automodel, metrics
from tests.e2e.test_grpo import GROUP, TINY, samples_of

STEPS = ("train.max_steps=2", "train.global_batch_size=16", "logging.report=false", "rollout.group_size=4")
BEST = "objective={_target_: automodel_cli.objectives.best_of_n.BestOfN, num_kept: 2, threshold: 0.6}"


def groups_of(run: Path) -> Iterator[list[dict[str, Any]]]:
    samples = samples_of(run)
    for first in range(0, len(samples), GROUP):
        yield samples[first : first + GROUP]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("selection")
    (folder / "tiny.yaml").write_text(TINY.format(family="llama").replace("objective: {kl_coef: 0.02}\n", ""))
    return folder


def train(folder: Path, objective: str, *overrides: str) -> Path:
    done = automodel(folder, "grpo", "llm", "-c", "tiny.yaml", objective, *STEPS, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "runs" / overrides[0].removeprefix("run_name=")


def test_the_best_of_each_group_are_trained_on_with_the_models_own_cross_entropy(folder):
    run = train(folder, BEST, "run_name=tiny")
    used = 0
    for group in groups_of(run):
        good = sorted((s["reward"] for s in group if s["reward"] > 0.6), reverse=True)[:2]
        assert sorted((s["reward"] for s in group if s["trained"]), reverse=True) == good
        used += len(good)
    rows = [row for row in metrics(run) if "nll" in row]
    assert sum(row["num_trained_samples"] for row in rows) == used > 0
    assert rows[0]["nll"] == pytest.approx(rows[0]["loss"], rel=1e-6)
    assert rows[0]["reward_trained"] > rows[0]["reward"]


def test_the_best_and_the_worst_of_each_group_are_pairs_and_the_first_loss_is_log_2(folder):
    run = train(folder, "objective={_target_: automodel_cli.objectives.online_dpo.OnlineDPO}", "run_name=pairs")
    used = 0
    for group in groups_of(run):
        rewards, pair = [s["reward"] for s in group], [s["reward"] for s in group if s["trained"]]
        different = max(rewards) > min(rewards)
        assert sorted(pair) == ([min(rewards), max(rewards)] if different else [])
        used += different
    rows = [row for row in metrics(run) if "rewards_margin" in row]
    assert sum(row["num_pairs"] for row in rows) == used > 0
    assert rows[0]["loss"] == pytest.approx(
        math.log(2), rel=1e-6
    )  # policy and reference are one before the first update
    assert rows[0]["num_pairs"] + rows[0]["num_unused_groups"] == rows[0]["num_groups"]
