"""GRPO with an environment as a user runs it: turns in rollouts.jsonl, rewards added, other ranks, one that raises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.command import automodel, curve, kill_after_step, metrics, start
from tests.e2e.test_grpo import run, same_run, samples_of, write_config
from tests.errors import assert_error

pytestmark = pytest.mark.slow

STOPS = f"+model.config.eos_token_id={[1, *range(100, 260)]}"  # so many that random weights end their messages
TOOL = [
    STOPS,
    "data.seq_len=128",
    "train.max_steps=2",
    "logging.report=false",
    "rollout.environment._target_=automodel_cli.rollout.environments.calculator.Calculator",
    "rollout.environment.pattern='([a-zA-Z0-9])'",
    "rollout.environment.max_turns=3",
    "rollout.environment.tool_call_reward=1.0",
    "rollout.environment.error_reward=-0.25",
    "rollout.environment.weight=0.5",
]
ALL_TOKENS = ["objective.kl_coef=0", "objective.top_entropy_fraction=null"]  # the loss is the mean over what was drawn
BRITTLE = """
from dataclasses import dataclass
from automodel_cli.rollout.environments.base import Environment, Turn

@dataclass(frozen=True, kw_only=True)
class Brittle(Environment):
    def step(self, messages, row, state):
        said = messages[-1]["content"]
        if len(said) % 2:
            raise KeyError("no such tool")
        return Turn(reward=float(len(said)))
"""


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in one process."""
    folder = tmp_path_factory.mktemp("played")
    write_config(folder)
    (folder / "output.txt").write_text(run(folder, *TOOL))
    return folder


def test_rollouts_hold_every_turn_and_the_reward_of_the_environment(played: Path) -> None:
    samples = samples_of(played / "runs" / "tiny")
    assert len(samples) == 32
    counts = set()
    for sample in samples:
        roles = [turn["role"] for turn in sample["turns"]]
        counts.add(len(roles))
        assert roles == ["assistant", "tool"] * (len(roles) // 2) + ["assistant"]
        assert sample["completion"] == sample["turns"][-1]["content"]
        parts = sample["parts"]
        wrong = sum(turn["content"].startswith("error") for turn in sample["turns"] if turn["role"] == "tool")
        right = len(roles) // 2 - wrong
        if sample["finish_reason"] == "stop":  # the last message called nothing
            assert parts["environment"] == right - 0.25 * wrong
        assert sample["reward"] == parts["digit"] + 0.5 * parts["other"] + 0.5 * parts["environment"]
    assert counts == {1, 3, 5}
    assert {sample["finish_reason"] for sample in samples} >= {"stop", "turns"}
    for row in (row for row in metrics(played / "runs" / "tiny") if "loss" in row):
        assert row["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-5)
        trained = [s for s in samples if s["step"] == row["step"] and s["trained"]]
        assert row["num_trained_samples"] == len(trained) and "reward_environment" in row
        assert 1 < row["turns"] < 3
    assert "[tool:" in (played / "output.txt").read_text()


def test_one_update_on_policy_counts_what_the_model_drew(tmp_path: Path) -> None:
    write_config(tmp_path)
    run(tmp_path, *TOOL, "train.max_steps=1", "train.global_batch_size=16", *ALL_TOKENS)
    (row,) = [row for row in metrics(tmp_path / "runs" / "tiny") if "loss" in row]
    trained = [sample for sample in samples_of(tmp_path / "runs" / "tiny") if sample["trained"]]
    count = sum(sample["num_tokens"] for sample in trained)
    assert row["num_label_tokens"] == count and row["probs_ratio_min"] == row["probs_ratio_max"] == 1.0
    mean = sum(sample["advantage"] * sample["num_tokens"] for sample in trained) / count
    assert row["loss"] == pytest.approx(-mean, abs=1e-6)


def turns_of(run: Path) -> list[Any]:
    return [sample["turns"] for sample in samples_of(run)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "overrides",
    [["mesh.dp_size=2"], ["mesh.pp_size=2", "pipeline=1f1b"], ["mesh.tp_size=2", "mesh.dp_size=1"], ["rollout=hf"]],
    ids=["fsdp2", "pp2", "tp2", "hf engine"],
)
def test_ranks_and_engines_do_not_change_the_run(played: Path, tmp_path: Path, overrides: list[str]) -> None:
    write_config(tmp_path)
    run(tmp_path, *TOOL, *overrides)
    same_run(tmp_path / "runs" / "tiny", played / "runs" / "tiny")
    assert turns_of(tmp_path / "runs" / "tiny") == turns_of(played / "runs" / "tiny")


def test_an_environment_that_raises_names_the_sample_and_the_run_goes_on(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "brittle.py").write_text(BRITTLE)
    node = [
        "rollout.environment._target_=brittle.Brittle",
        "rollout.environment.on_error=skip",
        STOPS,
        "train.max_steps=1",
    ]
    done = automodel(tmp_path, "grpo", "llm", "-c", "tiny.yaml", "--trust-package", "brittle", *node)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = samples_of(tmp_path / "runs" / "tiny")
    failed = [sample for sample in samples if sample["errors"]]
    assert 0 < len(failed) < len(samples)
    for sample in failed:
        assert sample["errors"] == {"environment": "KeyError: 'no such tool'"} and sample["finish_reason"] == "error"
        assert not sample["trained"] and "environment" not in sample["parts"]
        assert f"of {sample['origin']}, turn 1: KeyError: 'no such tool' (on_error=skip)" in done.stdout + done.stderr


def test_what_several_turns_cannot_be_combined_with_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path)
    for overrides, code, key in (
        (["rollout.overlong.buffer=2"], "unsupported_combination", "rollout.overlong.buffer"),
        (["data.chat_template=none"], "unsupported_combination", "data.chat_template"),
        (["rewards.environment=${rewards.digit}"], "invalid_value", "rewards.environment"),
        (["rollout.environment.max_turns=0"], "out_of_range", "rollout.environment.max_turns"),
    ):
        done = automodel(tmp_path, "grpo", "llm", "-c", "tiny.yaml", *TOOL, *overrides)
        assert done.returncode == 2, done.stdout + done.stderr
        assert_error(done.stderr, code, key)


LATE = """
import asyncio, random
from dataclasses import dataclass
from automodel_cli.rollout.environments.calculator import Calculator

@dataclass(frozen=True, kw_only=True)
class Late(Calculator):
    async def step(self, messages, row, state):
        await asyncio.sleep(random.SystemRandom().random() / 4)
        return super().step(messages, row, state)
"""


@pytest.mark.nightly
def test_a_run_is_bitwise_the_same_in_any_order_of_answers_and_after_a_kill(played: Path, tmp_path: Path) -> None:
    """Answers come after random times, and the run is killed between its two steps; the other had neither."""
    write_config(tmp_path)
    (tmp_path / "late.py").write_text(LATE)
    words = ["grpo", "llm", "-c", "tiny.yaml", "--trust-package", "late", *TOOL, "checkpoint.every=1"]
    killed = start(tmp_path, *words, "rollout.environment._target_=late.Late")
    folder, reference = tmp_path / "runs" / "tiny", played / "runs" / "tiny"
    kill_after_step(killed, folder, 1)
    resumed = automodel(tmp_path, "resume", "runs/tiny")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert samples_of(folder) == samples_of(reference)
    for key in ("loss", "grad_norm", "reward"):
        assert curve(folder, key) == curve(reference, key), key
    weights = [(path / "export" / "model.safetensors").read_bytes() for path in (folder, reference)]
    assert weights[0] == weights[1]


@pytest.mark.nightly
def test_a_model_learns_to_call_its_tool(tmp_path: Path) -> None:
    """Random weights call the calculator in 3 of 100 messages; each call that gives a number is worth 1, in two turns.
    Nothing else is rewarded, and the held-out conversations are greedy."""
    write_config(tmp_path)
    node = "_target_: automodel_cli.rollout.environments.calculator.Calculator"
    tool = f"{node}, pattern: '([0-9])', max_turns: 2, tool_call_reward: 1.0"
    learning = [
        f"rollout.environment={{{tool}}}",
        *("rewards=none", "~rewards.digit", "~rewards.other", STOPS, "data.seq_len=96", "logging.report=false"),
        *("rollout.prompts_per_step=8", "rollout.group_size=8", "rollout.top_p=1.0", "rollout.temperature=1.0"),
        *("train.global_batch_size=64", "train.microbatch_size=16", "train.max_steps=40", "optimizer.lr=3e-3"),
        *("objective.kl_coef=0", "objective.top_entropy_fraction=null", "checkpoint.every=1000"),
    ]
    run(tmp_path, *learning)
    folder = tmp_path / "runs" / "tiny"
    rewards = curve(folder, "reward")
    assert sum(rewards[:4]) / 4 < 0.2 and sum(rewards[-4:]) / 4 > 1.5
    assert curve(folder, "val_reward")[0] < 0.5 and curve(folder, "val_reward")[-1] > 1.5


THEIRS = """
import verifiers as vf
from datasets import Dataset

def rows():
    return Dataset.from_list([{"question": f"Say {n}", "answer": str(n)} for n in range(40)])

async def letters(completion):
    return sum(c in "abcdefg" for c in str(completion[-1].content)) / 8

class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages, state):
        return [vf.UserMessage(content="Again")]

def load_environment():
    return Twice(dataset=rows(), eval_dataset=rows(), rubric=vf.Rubric(funcs=[letters]), max_turns=2)
"""


def test_a_run_in_an_environment_of_verifiers(tmp_path: Path) -> None:
    verifiers = pytest.importorskip("verifiers")
    if not hasattr(verifiers, "load_environment"):
        pytest.skip("this release of verifiers has no load_environment")
    write_config(tmp_path)
    (tmp_path / "theirs.py").write_text(THEIRS)
    node = "automodel_cli.rollout.environments.verifiers"
    overrides = [
        f"data.generator={{_target_: {node}.VerifiersTasks, environment: theirs, num_validation: 4}}",
        f"rollout.environment={{_target_: {node}.VerifiersEnvironment, environment: theirs}}",
        "rewards=none",
        *("~rewards.digit", "~rewards.other", "data.seq_len=128", "train.max_steps=2", STOPS),
    ]
    done = automodel(tmp_path, "grpo", "llm", "-c", "tiny.yaml", "--trust-package", "theirs", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = samples_of(tmp_path / "runs" / "tiny")
    assert len(samples) == 32 and {sample["finish_reason"] for sample in samples} <= {"stop", "length"}
    for sample in samples:
        roles = [turn["role"] for turn in sample["turns"]]
        assert roles == (["assistant", "user", "assistant"] if sample["finish_reason"] == "stop" else roles)
        right = sum(c in "abcdefg" for c in sample["completion"]) / 8
        assert sample["reward"] == pytest.approx(right if roles[-1] == "assistant" else 0)
    for row in (row for row in metrics(tmp_path / "runs" / "tiny") if "loss" in row):
        assert row["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-5) and row["environment_failed"] == 0
