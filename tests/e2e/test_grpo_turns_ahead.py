"""Conversations that are drawn while steps train, as a user runs them: by which weights, and after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_cli.rollout.engines.base import sample_seed
from automodel_cli.rollout.engines.transformers_engine import HFEngine
from automodel_cli.rollout.environments.calculator import Calculator
from automodel_cli.rollout.environments.episode import Episode, EpisodeRunner
from automodel_cli.rollout.environments.pool import EnvironmentPool
from automodel_cli.rollout.types import SamplingParams
from tests.e2e.command import automodel, curve, kill_after_step, start
from tests.e2e.test_grpo import GROUP, PROMPTS, run, samples_of, write_config
from tests.e2e.test_grpo_ahead import HF, same_runs
from tests.e2e.test_grpo_turns import TOOL, turns_of

STOP_TOKENS = [1, *range(100, 260)]  # those of TOOL
CALCULATOR = Calculator(pattern="([a-zA-Z0-9])", max_turns=3, tool_call_reward=1.0, error_reward=-0.25, weight=0.5)
AHEAD = (*TOOL, *HF, "rollout.max_off_policy_steps=2", "optimizer.lr=1e-2", "train.max_steps=6", "checkpoint.every=1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run, and (`first`) of its first step alone."""
    folder = tmp_path_factory.mktemp("turns_ahead")
    write_config(folder)
    run(folder, *AHEAD, "run_name=whole")
    run(folder, *AHEAD, "train.max_steps=1", "run_name=first")
    return folder / "runs"


def played_by_hand(exported: Path, whole: Path, step: int) -> list[Any]:
    """The conversations on the prompts of `step` with exported weights and the seeds that the sampling documents."""
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, attn_implementation="sdpa")
    engine = HFEngine(model, stop_token_ids=STOP_TOKENS, pad_token_id=tokenizer.pad_token_id)
    episodes = []
    for number, sample in enumerate(sample for sample in samples_of(whole) if sample["step"] == step):
        seed = sample_seed(0, step, (step - 1) * PROMPTS + number // GROUP, number % GROUP)
        said = sample["prompt"]
        prompt = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)["input_ids"]
        episodes.append(Episode("", prompt, said, {}, seed))
    params = SamplingParams(max_new_tokens=8, temperature=0.9, top_p=0.95)
    with EnvironmentPool({"environment": CALCULATOR}) as pool:
        EpisodeRunner(engine, tokenizer, pool, params, 128).run_lockstep(episodes)
    return [episode.response_messages for episode in episodes]


@pytest.mark.slow
def test_conversations_are_those_of_the_weights_of_two_steps_earlier(runs: Path) -> None:
    """Step 4 plays with the weights after step 1: those that a run of one step exports."""
    whole = runs / "whole"
    assert curve(whole, "staleness") == curve(whole, "staleness_mean") == [0, 1, 2, 2, 2, 2]
    assert all(sample["weight_version"] == max(0, sample["step"] - 3) for sample in samples_of(whole))
    turns = {step: [s["turns"] for s in samples_of(whole) if s["step"] == step] for step in (4, 5)}
    assert {len(said) for said in turns[4]} >= {3, 5}, "the test shows nothing"
    assert played_by_hand(runs / "first" / "export", whole, 4) == turns[4]
    assert played_by_hand(runs / "first" / "export", whole, 5) != turns[5], "the test shows nothing"
    assert min(curve(whole, "gen_kl_error")[1:]) > 1e-6  # the policy moved on, and the loss is told


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_with_the_conversations_it_had_drawn(runs: Path, tmp_path: Path) -> None:
    write_config(tmp_path)
    run_dir = tmp_path / "runs" / "tiny"
    kill_after_step(start(tmp_path, "grpo", "llm", "-c", "tiny.yaml", *AHEAD), run_dir, 3)
    resumed = automodel(tmp_path, "resume", "runs/tiny")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert same_runs(run_dir, runs / "whole") and turns_of(run_dir) == turns_of(runs / "whole")


@pytest.mark.slow
def test_without_learning_it_is_the_run_in_turns(tmp_path: Path) -> None:
    write_config(tmp_path)
    rest = (*AHEAD, "optimizer.lr=1e-30", "optimizer.weight_decay=0", "train.max_steps=3")
    run(tmp_path, *rest, "run_name=turns", "rollout.max_off_policy_steps=0")
    run(tmp_path, *rest, "run_name=ahead", "mesh.dp_size=2")
    turns, ahead = (tmp_path / "runs" / name for name in ("turns", "ahead"))
    keys = ("step", "turns", "completion", "reward", "parts", "advantage", "trained", "finish_reason", "origin")
    left, right = ([{key: s[key] for key in keys} for s in samples_of(folder)] for folder in (turns, ahead))
    assert left == right
    assert curve(turns, "loss") == pytest.approx(curve(ahead, "loss"), abs=1e-6)
