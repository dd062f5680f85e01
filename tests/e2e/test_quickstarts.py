"""The quickstarts, each as a user runs it, until it has learnt something."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

from tests.e2e.command import automodel, metrics
from tests.pages import ROOT

pytestmark = pytest.mark.nightly  # a release check runs the first one


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


STALE_OF = ("none", "truncate")
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
    """The first 60 steps of the command on record, lr 3: mean rewards of steps 21 to 60.

    Without correction a run is chaotic: how a processor rounds decides how far it falls. Single seeds gave 0.20 to 0.86
    without correction and 0.89 to 0.99 with importance weights up to 2, on two processors.
    """
    (folder / "near_length.py").write_text(NEAR_LENGTH)
    reward = {setting: _of_stale(folder, setting, seed=2) for setting in STALE_OF}
    assert reward["truncate"] > max(0.87, reward["none"])


def _of_stale(folder: Path, setting: str, seed: int) -> float:
    command = STALE["command"]
    for name, value in {"SETTING": STALE["settings"][setting], "LR": "3", "SEED": str(seed)}.items():
        command = command.replace(name, value)
    run = f"stale_{setting}_{seed}"
    more = (f"run_name={run}", "logging.report=false", "validation.at_end=false", "train.max_steps=60")
    done = automodel(folder, *command.split()[1:], *more, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [row["reward"] for row in metrics(folder / "runs" / run) if "reward" in row]
    return statistics.fmean(rewards[20:60])


def test_a_teacher(folder: Path) -> None:
    before, after = before_and_after(folder, r"accuracy \w+ training: ([\d.]+)%", "kd", "llm", "-c", "quickstart_kd")
    assert before < 5 and after > 70


def test_text(tmp_path: Path) -> None:
    pattern = r"bits per byte ([\d.]+)"
    before, after = before_and_after(tmp_path, pattern, "pretrain", "llm", "-c", "quickstart_pretrain")
    assert 7.5 < before < 8.5 and after < 2.2


def test_preferences(tmp_path: Path) -> None:
    pattern = r"preference accuracy \w+ training: ([\d.]+)%"
    _, after = before_and_after(tmp_path, pattern, "dpo", "llm", "-c", "quickstart_dpo")
    assert after >= 90


def test_a_classifier(tmp_path: Path) -> None:
    pattern = r"\w+ training, 256 held-out examples: accuracy ([\d.]+)"
    command = ("finetune", "classifier", "-c", "quickstart_classifier")
    before, after = before_and_after(tmp_path, pattern, *command)
    assert before < 0.5 and after > 0.95


def test_embeddings(tmp_path: Path) -> None:
    pattern = r"\w+ training, 128 held-out queries: recall@1 ([\d.]+)"
    before, after = before_and_after(tmp_path, pattern, "finetune", "embedding", "-c", "quickstart_embedding")
    assert before < 0.1 and after > 0.7


def test_a_reward_model(tmp_path: Path) -> None:
    pattern = r"preference accuracy \w+ training: ([\d.]+)%"
    _, after = before_and_after(tmp_path, pattern, "rm", "llm", "-c", "quickstart_rm")
    assert after >= 75
