"""Asynchronous rollouts as a user runs them: which weights drew which sample, and how such a run ends and goes on."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_cli.rollout.engines.base import sample_seed
from automodel_cli.rollout.engines.transformers_engine import HFEngine
from automodel_cli.rollout.types import SamplingParams
from tests.e2e.command import automodel, curve, environment, kill_after_step, metrics, start
from tests.e2e.test_grpo import GROUP, PROMPTS, run, samples_of, write_config
from tests.errors import assert_error

pytestmark = pytest.mark.slow

HF = (
    "rollout=hf",
    "logging.report=false",
    "objective.sampler_correction=truncate",
    "objective.sampler_correction_clip_max=2.0",
)
AHEAD = (*HF, "rollout.max_off_policy_steps=1", "optimizer.lr=1e-2")
STEPS = 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run, and (`first`) its first step alone."""
    folder = tmp_path_factory.mktemp("ahead")
    write_config(folder)
    alarm = "rollout.warn_token_mult_prob_error=1.00001"  # less than what a step moves
    (folder / "output.txt").write_text(run(folder, *AHEAD, f"train.max_steps={STEPS}", "run_name=whole", alarm))
    run(folder, *AHEAD, "train.max_steps=1", "run_name=first")
    return folder / "runs"


def texts(folder: Path, step: int) -> list[str]:
    return [sample["completion"] for sample in samples_of(folder) if sample["step"] == step]


def test_samples_are_one_step_old_from_the_second_step_on(whole: Path) -> None:
    assert curve(whole / "whole", "staleness") == [0, 1, 1, 1]
    assert curve(whole / "whole", "weight_version") == [0, 0, 1, 2]
    for sample in samples_of(whole / "whole"):
        assert sample["weight_version"] == max(0, sample["step"] - 2)
    first, *later = curve(whole / "whole", "gen_kl_error")
    assert first == pytest.approx(0, abs=1e-6) and min(later) > 1e-6  # the policy moved on, and the loss is told


def test_that_stale_samples_differ_is_said_once(whole: Path) -> None:
    assert min(curve(whole / "whole", "token_mult_prob_error")[1:]) > 1.00001, "the test shows nothing"
    text = (whole.parent / "output.txt").read_text()
    assert text.count("sampler and trainer disagree") == 1 and "as rollout.max_off_policy_steps allows" in text


def drawn_by(model: Any, tokenizer: Any, whole: Path, step: int) -> list[str]:
    """What the library's model answers to the prompts of `step` with the seeds that the sampling documents."""
    stops = list({tokenizer.eos_token_id, model.config.eos_token_id})
    engine = HFEngine(model, stop_token_ids=stops, pad_token_id=tokenizer.pad_token_id)
    samples = [sample for sample in samples_of(whole) if sample["step"] == step]
    places = [(step - 1) * PROMPTS + number // GROUP for number in range(len(samples))]
    seeds = [sample_seed(0, step, place, number % GROUP) for number, place in enumerate(places)]
    prompts = [
        tokenizer.apply_chat_template(s["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
        for s in samples
    ]
    params = SamplingParams(max_new_tokens=8, temperature=0.9, top_p=0.95)
    return [tokenizer.decode(c.tokens, skip_special_tokens=True) for c in engine.generate(prompts, params, seeds)]


def test_they_are_those_of_the_weights_of_one_step_earlier(whole: Path) -> None:
    """Step 3 samples with the weights after step 1: those that a run of one step exports."""
    exported = whole / "first" / "export"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, attn_implementation="sdpa")
    assert drawn_by(model, tokenizer, whole / "whole", 3) == texts(whole / "whole", 3)
    newest = AutoModelForCausalLM.from_pretrained(whole / "whole" / "export", dtype=torch.float32)
    assert drawn_by(newest, tokenizer, whole / "whole", 3) != texts(whole / "whole", 3), "the test shows nothing"


DYNAMIC = ["rollout.dynamic_sampling={max_gen_batches: 8}", "rollout.group_size=2"]


@pytest.mark.parametrize(
    ("more", "depth"),
    [([], 2), (DYNAMIC, 1)],
    ids=["plain", "dynamic sampling"],
)
def test_without_learning_it_is_the_synchronous_run(tmp_path: Path, more: list[str], depth: int) -> None:
    write_config(tmp_path)
    rest = (*HF, *more, "optimizer.lr=1e-30", "optimizer.weight_decay=0", "train.max_steps=3")
    run(tmp_path, *rest, "run_name=turns")
    run(tmp_path, *rest, "run_name=ahead", f"rollout.max_off_policy_steps={depth}")
    turns, ahead = (tmp_path / "runs" / name for name in ("turns", "ahead"))
    keys = ("step", "prompt", "completion", "reward", "advantage", "trained", "finish_reason", "origin")
    left, right = ([{key: s[key] for key in keys} for s in samples_of(folder)] for folder in (turns, ahead))
    assert left == right
    for key in ("loss", "grad_norm", "reward", "num_sampled", "gen_kl_error"):
        assert curve(turns, key) == curve(ahead, key), key
    assert curve(turns, "staleness") == [0, 0, 0] and curve(ahead, "staleness") == [0, 1, min(depth, 2)]
    if more:
        assert max(curve(ahead, "num_sampled")) > PROMPTS * 2, "the test shows nothing"


def test_two_ranks_draw_what_one_does(whole: Path, tmp_path: Path) -> None:
    write_config(tmp_path)
    run(tmp_path, *AHEAD, f"train.max_steps={STEPS}", "mesh.dp_size=2")
    for step in range(1, STEPS + 1):
        assert texts(tmp_path / "runs" / "tiny", step) == texts(whole / "whole", step)


PATCHED = """
import sys, threading, time
from automodel_cli.config.errors import RunError
from automodel_cli.rollout.engines.transformers_engine import HFEngine

whole = HFEngine.generate

def generate(self, *arguments):
    if threading.current_thread() is not threading.main_thread():
        {extra}
    return whole(self, *arguments)

HFEngine.generate = generate
from automodel_cli.__main__ import main
sys.exit(main())
"""


def run_with(folder: Path, extra: str, *overrides: str) -> Any:
    """A run whose thread does `extra` before it generates."""
    command = [sys.executable, "-c", PATCHED.format(extra=extra), "grpo", "llm", "-c", "tiny.yaml", *AHEAD, *overrides]
    return subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=120, check=False
    )


def test_a_slow_engine_is_waited_for_before_its_weights_change(whole: Path, tmp_path: Path) -> None:
    write_config(tmp_path)
    done = run_with(tmp_path, "time.sleep(4)", "train.max_steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "tiny"
    assert curve(folder, "staleness") == [0, 1] and min(curve(folder, "rollout_seconds")[1:]) > 4
    assert texts(folder, 2) == texts(whole / "whole", 2)


def test_what_fails_in_the_thread_ends_the_run_with_its_message(tmp_path: Path) -> None:
    write_config(tmp_path)
    done = run_with(tmp_path, "raise RunError('the engine is out of order', fix='mend it')", "train.max_steps=3")
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        re.search(r"RunError \[\w+\]: the engine is out of order", done.stderr)
        and "mend it" in done.stderr.splitlines()[-1]
    )
    assert [row["step"] for row in metrics(tmp_path / "runs" / "tiny") if "loss" in row] == [1]


def stopped_after_two_steps(folder: Path, num_steps: int) -> int:
    """A run of `write_config` that SIGTERM ended; the step after which."""
    process = start(folder, "grpo", "llm", "-c", "tiny.yaml", *AHEAD, f"train.max_steps={num_steps}")
    run_dir = folder / "runs" / "tiny"
    deadline = time.monotonic() + 240
    while not ((run_dir / "metrics.jsonl").exists() and any(row.get("step", 0) >= 2 for row in metrics(run_dir))):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGTERM)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 75 and "continue with: automodel resume" in output, output
    stopped = max(sample["step"] for sample in samples_of(run_dir))
    assert 2 <= stopped < num_steps, "it was stopped too late to show anything"
    return stopped


def same_runs(left: Path, right: Path) -> bool:
    """Every sample, and the numbers of every step, to the bit."""
    keys = ("loss", "grad_norm", "staleness", "staleness_mean", "weight_version")
    return samples_of(left) == samples_of(right) and all(curve(left, key) == curve(right, key) for key in keys)


def test_a_stopped_run_goes_on_bitwise(tmp_path: Path) -> None:
    """With the samples that were drawn when it stopped, by weights that no longer exist then."""
    write_config(tmp_path)
    stopped_after_two_steps(tmp_path, 12)
    resumed = automodel(tmp_path, "resume", "runs/tiny")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    run(tmp_path, *AHEAD, "train.max_steps=12", "run_name=whole")
    assert curve(tmp_path / "runs" / "tiny", "staleness") == [0, *[1] * 11]
    assert same_runs(tmp_path / "runs" / "tiny", tmp_path / "runs" / "whole")


DEEP = (*AHEAD, "rollout.max_off_policy_steps=2", "train.max_steps=12")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rollouts ahead, uninterrupted."""
    folder = tmp_path_factory.mktemp("deep")
    write_config(folder)
    run(folder, *DEEP)
    return folder / "runs" / "tiny"


def test_two_rollouts_ahead_samples_are_those_of_the_weights_of_two_steps_earlier(whole: Path, deep: Path) -> None:
    """Step 4 samples with the weights after step 1; what was begun at the start has the first weights."""
    assert curve(deep, "staleness") == curve(deep, "staleness_mean") == [0, 1, *[2] * 10]
    assert all(sample["weight_version"] == max(0, sample["step"] - 3) for sample in samples_of(deep))
    exported = whole / "first" / "export"
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32, attn_implementation="sdpa")
    assert drawn_by(model, tokenizer, deep, 4) == texts(deep, 4)
    assert drawn_by(model, tokenizer, deep, 5) != texts(deep, 5), "the test shows nothing"


def test_a_run_that_was_killed_two_rollouts_ahead_goes_on_bitwise(deep: Path, tmp_path: Path) -> None:
    write_config(tmp_path)
    run_dir = tmp_path / "runs" / "tiny"
    kill_after_step(start(tmp_path, "grpo", "llm", "-c", "tiny.yaml", *DEEP), run_dir, 5)
    resumed = automodel(tmp_path, "resume", "runs/tiny")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert same_runs(run_dir, deep)


def test_a_run_that_goes_on_with_another_sampling_draws_anew(tmp_path: Path) -> None:
    write_config(tmp_path)
    stopped = stopped_after_two_steps(tmp_path, 12)
    resumed = automodel(tmp_path, "resume", "runs/tiny", "rollout.temperature=0.5")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert curve(tmp_path / "runs" / "tiny", "staleness") == [0, *[1] * (stopped - 1), 0, *[1] * (11 - stopped)]


def test_it_is_refused_where_it_would_be_wrong(tmp_path: Path) -> None:
    write_config(tmp_path)
    key = "rollout.max_off_policy_steps"
    for overrides, code, fix in (
        ([f"{key}=1", *HF[2:]], "unsupported_combination", "rollout=hf"),
        ([f"{key}=1", "rollout=hf"], "requires_setting", "objective.sampler_correction=truncate"),
    ):
        done = automodel(tmp_path, "check", "-c", "tiny.yaml", *overrides)
        assert done.returncode == 2, done.stdout + done.stderr
        assert_error(done.stderr, code, key, fix=fix)
