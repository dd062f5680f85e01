"""GRPO as a user runs it: what a run leaves behind, what its first step must be, kill and resume, other ranks."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.command import automodel, curve, kill_after_step, metrics, start
from tests.errors import assert_error
from tests.pages import undocumented_metrics

STEPS, PROMPTS, GROUP = 6, 4, 4
TINY = """
defaults: [grpo, _self_, override rewards: none]
model:
  config:
    model_type: {family}
    vocab_size: 354
    hidden_size: 64
    intermediate_size: 128
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
    head_dim: 16
    initializer_range: 0.1
    tie_word_embeddings: true
  tokenizer: {{_target_: automodel_cli.models.tokenizer.ByteTokenizer}}
data:
  generator: {{_target_: automodel_cli.data.synthetic.chat_tasks.ChatTasks, num_train: 400, num_validation: 8}}
  seq_len: 64
rollout:
  {{prompts_per_step: 4, group_size: 4, max_new_tokens: 8, temperature: 0.9, top_p: 0.95, log_samples_every: 3,
    validation_samples: 2}}
rewards:
  digit:
    _target_: automodel_cli.rollout.rewards.text.FormatRegex
    pattern: ".*[a-n].*"
    timeout: null
  other:
    _target_: automodel_cli.rollout.rewards.text.FormatRegex
    pattern: ".*[A-P].*"
    weight: 0.5
    timeout: null
objective: {{kl_coef: 0.02}}
parallelizer:
  mp_policy: {{_target_: automodel_cli.distributed.config.MixedPrecision, param_dtype: float32}}
optimizer: {{lr: 1e-3, eps: 1e-5}}  # by far less, Adam makes steps of rounding errors, and ranks differ by theirs
train: {{global_batch_size: 8, microbatch_size: 2, max_steps: 6, epochs: null, num_cpu_threads: 1}}
checkpoint: {{every: 2}}
"""
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def write_config(folder: Path, family: str = "llama") -> None:
    """TINY, trained on its least certain tokens: a column more that runs must carry through all they do."""
    (folder / "tiny.yaml").write_text(
        TINY.format(family=family).replace("kl_coef: 0.02", "kl_coef: 0.02, top_entropy_fraction: 0.7")
    )


def samples_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]


def run(folder: Path, *overrides: str) -> str:
    done = automodel(folder, "grpo", "llm", "-c", "tiny.yaml", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run in one process; two updates a step."""
    folder = tmp_path_factory.mktemp("whole")
    write_config(folder)
    (folder / "output.txt").write_text(run(folder))
    return folder


def test_run_folder_holds_every_sample_and_every_number(whole: Path) -> None:
    folder = whole / "runs" / "tiny"
    rows = [row for row in metrics(folder) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    promised = {"reward", "response_length", "kl_penalty", "clip_fraction", "gen_kl_error", "token_mult_prob_error"}
    promised |= {"reward_digit", "reward_other", "num_zero_std_groups", "truncation_rate", "weight_version"}
    assert all(promised <= set(row) for row in rows)
    (held_out,) = [row for row in metrics(folder) if "val_reward" in row and row["step"] == STEPS]
    assert held_out["val_avg_at_k"] <= held_out["val_best_at_k"] <= 1.5 and 0 <= held_out["val_pass_at_k"] <= 1
    samples = samples_of(folder)
    assert Counter(sample["step"] for sample in samples) == dict.fromkeys(range(1, STEPS + 1), PROMPTS * GROUP)
    for sample in samples:
        parts = sample["parts"]
        assert sample["reward"] == parts["digit"] + 0.5 * parts["other"]
        assert sample["weight_version"] == sample["step"] - 1  # the engine always had the newest weights
        assert sample["prompt"][-1]["role"] == "user" and sample["finish_reason"] in ("stop", "length")
    for row in rows:
        mine = [s for s in samples if s["step"] == row["step"]]
        assert row["reward"] == pytest.approx(sum(s["reward"] for s in mine) / len(mine))
        assert row["num_trained_samples"] == sum(s["trained"] for s in mine)
        assert 0 < row["reward_seconds"] < row["rollout_seconds"]
        assert row["generate_seconds"] == pytest.approx(row["rollout_seconds"] - row["reward_seconds"])
        parts = sum(row[f"{name}_seconds"] for name in ("rollout", "score", "train", "sync"))
        assert 0.5 * row["step_seconds"] < parts < row["step_seconds"] + 0.05
        for name in ("score", "train"):
            tokens = row[f"{name}_tokens_per_second"] * row[f"{name}_seconds"]
            assert tokens == pytest.approx(row["num_tokens"], rel=1e-4)
        groups: dict[str, list[bool]] = {}
        for sample in mine:
            groups.setdefault(sample["origin"], []).append(min(sample["parts"].values()) >= 1)
        assert row["num_solved_groups"] == sum(map(all, groups.values()))
        advantages = np.array([s["advantage"] for s in mine if s["trained"]])
        for name in ("min", "max", "mean", "std"):
            assert row[f"advantage_{name}"] == pytest.approx(getattr(advantages, name)(), abs=1e-9)
        others = [s["reward"] for s in mine if not s["trained"]]
        assert row.get("reward_zero_std_groups") == (pytest.approx(np.mean(others)) if others else None)
        assert row["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-5)


def test_groups_that_teach_nothing_are_left_out(whole: Path) -> None:
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for sample in samples_of(whole / "runs" / "tiny"):
        groups.setdefault((sample["step"], sample["origin"]), []).append(sample)
    different = 0
    for group in groups.values():
        differs = len({sample["reward"] for sample in group}) > 1
        different += differs
        assert all(sample["trained"] == differs for sample in group)
        if not differs:
            assert all(sample["advantage"] == 0 for sample in group)
    assert 0 < different < len(groups), "the test shows nothing"


def test_every_metric_is_documented(whole: Path) -> None:
    assert undocumented_metrics(whole / "runs" / "tiny") == set()


def test_the_output_tells_rewards_and_shows_samples(whole: Path) -> None:
    text = (whole / "output.txt").read_text()
    assert "reward before training:" in text and "reward after training:" in text
    assert "samples of step 3" in text and "advantage" in text
    warnings = [line for line in text.splitlines() if "WARNING" in line]
    assert (
        len(warnings) == 1 and "did not end within rollout.max_new_tokens=8" in warnings[0]
    )  # random weights never do
    page = (whole / "runs" / "tiny" / "report.html").read_text()
    assert "reward" in page and "response length" in page


def test_export_loads_in_transformers(whole: Path) -> None:
    folder = whole / "runs" / "tiny" / "export"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2 + 2"}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    assert torch.isfinite(model(**ids).logits).all()


@pytest.mark.smoke
def test_one_update_on_policy_is_exactly_that(tmp_path: Path) -> None:
    write_config(tmp_path)
    alarm = "rollout.warn_token_mult_prob_error=1.0000000001"  # less than what rounding makes
    more = ["train.global_batch_size=16", "train.max_steps=1", "logging.report=false", alarm]
    more += ["objective.kl_coef=0", "objective.top_entropy_fraction=null"]
    assert "WARNING: sampler and trainer disagree" in run(tmp_path, *more)
    folder = tmp_path / "runs" / "tiny"
    (row,) = [row for row in metrics(folder) if "loss" in row]
    assert row["probs_ratio_min"] == row["probs_ratio_max"] == 1.0 and row["clip_fraction"] == 0.0
    assert "score_tokens_per_second" not in row  # nothing is measured before an only update
    trained = [sample for sample in samples_of(folder) if sample["trained"]]
    count = sum(sample["num_tokens"] for sample in trained)
    mean = sum(sample["advantage"] * sample["num_tokens"] for sample in trained) / count
    assert row["loss"] == pytest.approx(-mean, abs=1e-6)
    assert row["num_label_tokens"] == count


@pytest.mark.slow
def test_a_killed_run_goes_on_bitwise(whole: Path, tmp_path: Path) -> None:
    """Killed while it samples: every completed step that was saved stands, and the rest is what it would have been."""
    write_config(tmp_path)
    killed = start(tmp_path, "grpo", "llm", "-c", "tiny.yaml")
    folder, reference = tmp_path / "runs" / "tiny", whole / "runs" / "tiny"
    kill_after_step(killed, folder, 3)
    resumed = automodel(tmp_path, "resume", "runs/tiny")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    for key in ("loss", "grad_norm", "reward", "response_length", "val_reward"):
        assert curve(folder, key)[-STEPS:] == curve(reference, key)[-STEPS:], key
    assert samples_of(folder) == samples_of(reference)
    weights = [(path / "export" / "model.safetensors").read_bytes() for path in (folder, reference)]
    assert weights[0] == weights[1]


def same_run(ours: Path, reference: Path) -> None:
    """The same samples, to the token, and the same numbers."""
    keys = ("step", "completion", "reward", "trained", "finish_reason")
    left, right = ([{key: s[key] for key in keys} for s in samples_of(path)] for path in (ours, reference))
    assert left == right
    for key in ("reward", "val_reward", "num_label_tokens"):
        assert curve(ours, key) == pytest.approx(curve(reference, key))
    for key in ("loss", "grad_norm", "kl_penalty", "probs_ratio"):
        assert curve(ours, key) == pytest.approx(curve(reference, key), rel=1e-4, abs=1e-6), key


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["mesh.dp_size=2"],
        ["mesh.pp_size=2", "pipeline=1f1b"],
        ["mesh.cp_size=2", "mesh.dp_size=1"],
        ["mesh.tp_size=2", "mesh.dp_size=1"],
        ["rollout=hf", "mesh.dp_size=2"],
    ],
    ids=["fsdp2", "pp2", "cp2", "tp2", "hf engine"],
)
def test_ranks_and_engines_do_not_change_the_run(whole: Path, tmp_path: Path, overrides: list[str]) -> None:
    write_config(tmp_path)
    run(tmp_path, *overrides)
    same_run(tmp_path / "runs" / "tiny", whole / "runs" / "tiny")


@pytest.mark.slow
def test_pipeline_of_expert_parallel_stages_from_end_to_end(tmp_path: Path) -> None:
    """Generation, log-probs, reference, training and export on four ranks: the run of one process. By default on two
    stages, in test_grpo_hybrids and test_ppo; on these four ranks, without the command, in dist/test_grpo."""
    write_config(tmp_path, "qwen3_moe")
    fields = [f"+model.config.{key}={value}" for key, value in MOE.items()]
    more = [*fields, "train.max_steps=2", "logging.report=false", "train.microbatch_size=1"]
    run(tmp_path, "run_name=one", *more)
    run(tmp_path, "run_name=four", *more, "mesh.pp_size=2", "mesh.dp_size=2", "mesh.ep_size=2", "pipeline=1f1b")
    same_run(tmp_path / "runs" / "four", tmp_path / "runs" / "one")


def test_dynamic_sampling_fills_steps_with_groups_that_teach(tmp_path: Path) -> None:
    write_config(tmp_path)
    dynamic = "rollout.dynamic_sampling={max_gen_batches: 8}"
    run(tmp_path, dynamic, "train.max_steps=2", "objective.kl_placement=reward")
    folder = tmp_path / "runs" / "tiny"
    for row in (row for row in metrics(folder) if "loss" in row):
        assert row["num_groups"] == PROMPTS and row["num_zero_std_groups"] == 0
        assert row["num_sampled"] >= PROMPTS * GROUP
        kept = [s["num_tokens"] for s in samples_of(folder) if s["step"] == row["step"]]
        dropped = row["num_sampled"] - len(kept)  # their responses have 1 to 8 tokens
        drawn = row["rollout_tokens_per_second"] * row["rollout_seconds"]
        assert sum(kept) + dropped - 1e-6 <= drawn <= sum(kept) + 8 * dropped + 1e-6


def test_wrong_configs_are_refused_with_a_fix(tmp_path: Path) -> None:
    write_config(tmp_path)
    for overrides, code, key in (
        (["train.global_batch_size=12"], "not_divisible", "train.global_batch_size"),
        (["rollout.max_new_tokens=64"], "sequence_length", "rollout.max_new_tokens"),
        (["objective.importance_sampling_level=on_policy"], "unsupported_combination", "objective"),
        (["rollout.temperature=0", "rollout.top_p=1.0"], "out_of_range", "rollout.temperature"),
        (["data.loss_mask=all"], "not_supported", "data.loss_mask"),
        (["+model.config.index_topk=16"], "not_supported_by_model", "rollout.engine"),
    ):
        done = automodel(tmp_path, "grpo", "llm", "-c", "tiny.yaml", *overrides)
        assert done.returncode == 2, done.stdout + done.stderr
        assert_error(done.stderr, code, key)
    missing = ["model.pretrained=runs/quickstart/export", "model.config=null"]
    done = automodel(tmp_path, "grpo", "llm", "-c", "tiny.yaml", *missing)
    assert done.returncode == 2 and "automodel finetune llm -c quickstart" in done.stderr, done.stdout + done.stderr
    done = automodel(tmp_path, "grpo", "llm", "-c", "tiny.yaml", "model.config.model_type=stablelm")
    assert_error(done.stderr, "not_measured", "stablelm", fix="rollout=hf")
    (tmp_path / "plain.yaml").write_text("defaults: [quickstart, _self_]")
    done = automodel(tmp_path, "grpo", "llm", "-c", "plain.yaml")
    assert done.returncode == 2
    assert_error(done.stderr, "wrong_recipe", values=("grpo",))


def test_a_step_with_nothing_to_learn_changes_nothing_and_the_run_goes_on(tmp_path: Path) -> None:
    write_config(tmp_path)
    output = run(tmp_path, "rewards.digit.pattern='.*'", "rewards.other.weight=0", "train.max_steps=2")
    assert "no update: no group had different rewards" in output and "nan" not in output
    for row in (row for row in metrics(tmp_path / "runs" / "tiny") if "reward" in row):
        assert row["loss"] is None and row["num_zero_std_groups"] == PROMPTS and row["num_trained_samples"] == 0


def test_dynamic_sampling_goes_on_when_the_model_has_become_good(tmp_path: Path) -> None:
    """Every answer is right, so no batch of prompts has a group to learn from."""
    write_config(tmp_path)
    solved = ["rewards.digit.pattern='.*'", "rewards.other.weight=0", "rollout.dynamic_sampling={max_gen_batches: 3}"]
    output = run(tmp_path, *solved, "train.max_steps=2", "logging.report=false")
    assert output.count("after 3 batches of prompts 0 of 4 groups have different rewards") == 1
    assert "the mean reward of the others is 1)" in output and "no update" in output
    rows = [row for row in metrics(tmp_path / "runs" / "tiny") if "reward" in row]
    assert [row["num_sampled"] for row in rows] == [3 * PROMPTS * GROUP] * 2
    assert [(row["reward"], row["num_groups"], row["num_zero_std_groups"]) for row in rows] == [
        (1, PROMPTS, PROMPTS)
    ] * 2


LIAR = """
import dataclasses, torch
from automodel_cli.rollout.engines.base import Capabilities

@dataclasses.dataclass(frozen=True)
class Liar:
    capabilities = Capabilities(logprobs=True, weight_updates=True)
    draws_from: int = 0     # top_k of what it draws from, whatever it is asked
    unshaped: bool = False  # it reports the log-probs of the plain softmax
    def build(self, host):
        return Engine(host.replica(), self)

class Engine:
    capabilities, weight_version = Liar.capabilities, 0
    def __init__(self, copy, config):
        self.copy, self.config = copy, config
    def update_weights(self, stream):
        self.copy.update_weights(stream)
    def generate(self, prompts, params, seeds=None):
        params = dataclasses.replace(params, top_k=self.config.draws_from)
        found = self.copy.generate(prompts, params, seeds)
        return [self.told(p, c) for p, c in zip(prompts, found)] if self.config.unshaped else found
    @torch.no_grad()
    def told(self, prompt, completion):
        ids = torch.tensor([[*prompt, *completion.tokens]])
        logits_TV = self.copy.model(ids).logits[0, len(prompt) - 1 : -1]
        logprobs_T = logits_TV.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
        return dataclasses.replace(completion, logprobs=logprobs_T.tolist())
"""


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ("draws_from=3", "speculative decoding"),
        ("unshaped=true", "vllm serve MODEL --logprobs-mode processed_logprobs"),
    ],
)
def test_an_engine_whose_logprobs_are_not_the_trainers_is_refused_before_step_1(
    tmp_path: Path, lie: str, said: str
) -> None:
    write_config(tmp_path)
    (tmp_path / "liar.py").write_text(LIAR)
    node = ["rollout.engine._target_=liar.Liar", f"rollout.engine.{lie}", "--trust-package", "liar"]
    done = automodel(tmp_path, "grpo", "llm", "-c", "tiny.yaml", "rollout.temperature=0.3", *node)
    assert done.returncode == 1 and said in done.stderr, done.stdout + done.stderr
    assert re.search(r"token \d+ \(.*\), engine -\d\.\d+, trainer -\d+\.\d+", done.stderr)
    assert_error(done.stderr, "logprob_mismatch", "rollout.max_initial_logprob_gap=0.1")
    assert "step 1/" not in done.stdout


@pytest.mark.slow
def test_a_reward_that_never_works_stops_the_run(tmp_path: Path) -> None:
    """Two rewards that judge and one with a mistake in it: a run of 6 steps would end as if all were well."""
    write_config(tmp_path)
    (tmp_path / "broken.py").write_text("def reward(completion, row):\n    return row['answr']\n")
    kind = "automodel_cli.rollout.rewards.text.FunctionReward"
    node = f"{{_target_: {kind}, function: {{_target_: broken.reward, _partial_: true}}}}"
    done = automodel(tmp_path, "grpo", "-c", "tiny.yaml", f"rewards.mine={node}", "--trust-package", "broken")
    assert done.returncode == 1, done.stdout + done.stderr
    assert_error(done.stderr, "reward_failed", "rewards.mine.weight=0", values=("step 1", 16, "KeyError: 'answr'"))


def test_adapters_are_their_own_reference(tmp_path: Path) -> None:
    """Before the first update the policy is the reference; afterwards it moves away."""
    write_config(tmp_path)
    run(tmp_path, "model.lora={rank: 4}", "objective.kl_coef=0.1", "optimizer.lr=1e-2", "train.max_steps=3")
    first, *_, last = curve(tmp_path / "runs" / "tiny", "kl_penalty")
    assert last > first >= 0
    assert curve(tmp_path / "runs" / "tiny", "gen_kl_error") == pytest.approx([0.0] * 3, abs=1e-5)
