"""The quickstarts, each as a user runs it, until it has learnt something."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.e2e.command import automodel
from tests.pages import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the quickstart was run."""
    folder = tmp_path_factory.mktemp("quickstarts")
    done = automodel(folder, "finetune", "llm", "-c", "quickstart", timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def before_and_after(folder: Path, pattern: str, *command: str) -> tuple[float, float]:
    done = automodel(folder, *command, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    before, after = (float(value) for value in re.findall(pattern, done.stdout))
    return before, after


def test_rewards(folder: Path) -> None:
    before, after = before_and_after(folder, r"reward \w+ training: ([\d.]+)", "grpo", "llm", "-c", "quickstart_grpo")
    seeds = json.loads((ROOT / "results" / "grpo_seeds.json").read_text())["seeds"].values()
    assert after >= before + 0.2 and after >= min(seed["val_reward"] for seed in seeds) - 0.05


def test_a_critic(folder: Path) -> None:
    """Its first 80 of 200 steps."""
    few = ("grpo", "llm", "-c", "quickstart_ppo", "train.max_steps=80")
    before, after = before_and_after(folder, r"reward \w+ training: ([\d.]+)", *few)
    assert after > before + 0.1


def test_a_teacher(folder: Path) -> None:
    before, after = before_and_after(folder, r"accuracy \w+ training: ([\d.]+)%", "kd", "llm", "-c", "quickstart_kd")
    assert before < 5 and after > 70


def test_preferences(tmp_path: Path) -> None:
    pattern = r"preference accuracy \w+ training: ([\d.]+)%"
    _, after = before_and_after(tmp_path, pattern, "dpo", "llm", "-c", "quickstart_dpo")
    assert after >= 90


def test_a_reward_model(tmp_path: Path) -> None:
    pattern = r"preference accuracy \w+ training: ([\d.]+)%"
    _, after = before_and_after(tmp_path, pattern, "rm", "llm", "-c", "quickstart_rm")
    assert after >= 75
