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


STALE = json.loads((ROOT / "results" / "stale_collapse.json").read_text())
NEAR_LENGTH = """
from dataclasses import dataclass
from automodel_cli.rollout.rewards.base import Reward

@dataclass(frozen=True, kw_only=True)
class NearLength(Reward):
    def score(self, sample):
        return max(0.0, 1.0 - abs(sample.num_tokens - 6) / 6)
"""


def test_without_correction_samples_of_earlier_steps_undo_what_was_learnt(folder: Path) -> None:
    """The command on record, seed 0: 0.17 without correction, 0.94 and more with importance weights up to 2."""
    (folder / "near_length.py").write_text(NEAR_LENGTH)
    after = {}
    for setting in ("none", "truncate"):
        words = STALE["command"].replace("SETTING", STALE["settings"][setting]).replace("SEED", "0").split()[1:]
        command = (*words, f"run_name=stale_{setting}", "logging.report=false")
        before, after[setting] = before_and_after(folder, r"reward \w+ training: ([\d.]+)", *command)
        assert 0.2 < before < 0.4
    assert after["none"] < 0.3 and after["truncate"] > 0.7


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
