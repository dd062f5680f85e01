"""The bundled recipe of a small model that learns to use a calculator, on a shrunken model of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_cli.rollout.environments.calculator import Calculator
from tests.e2e.command import automodel, metrics
from tests.e2e.test_grpo import samples_of

STOPS = [1, *range(100, 260)]  # so many that random weights end their messages
MODEL = (
    f"model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2, "
    f"num_key_value_heads: 1, vocab_size: 354, eos_token_id: {STOPS}"
)
EVAL = """
tasks: {answers: {_target_: automodel_cli.evaluation.config.Generation, max_new_tokens: 16}}
"""
SHRUNKEN = [  # with the byte tokenizer a character is a token
    "model.pretrained=null",
    f"model.config={{{MODEL}}}",
    "rollout.environment.pattern='([0-9a-zA-Z])'",  # random weights make no other call; of a digit it is one
    "model.tokenizer._target_=automodel_cli.models.tokenizer.ByteTokenizer",
    *("train.max_steps=1", "lr_scheduler.warmup_steps=0", "logging.report=false"),
    *("data.generator.num_train=40", "data.generator.num_validation=6", "rollout.log_samples_every=null"),
]


def test_one_step_of_the_recipe_plays_conversations_behind_its_worked_examples(tmp_path: Path) -> None:
    done = automodel(tmp_path, "grpo", "llm", "-c", "grpo_smollm2_tools", *SHRUNKEN)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "grpo_smollm2_tools"
    samples = samples_of(folder)
    assert len(samples) == 16
    for sample in samples:
        roles = [message["role"] for message in sample["prompt"]]
        assert roles == ["system", *("user", "assistant", "tool", "assistant") * 2, "user"]
        assert set(sample["parts"]) == {"exact", "environment"}
    (row,) = [row for row in metrics(folder) if "loss" in row]
    assert row["num_judged"] == 16 and row["token_mult_prob_error"] < 1.00001
    assert row["num_trained_samples"] > 0 and row["loss"] is not None
    assert "the mean of 6 held-out prompts" in done.stdout
    conversations_are_judged(tmp_path, samples[0]["prompt"][:-1])


def conversations_are_judged(home: Path, before: list[dict[str, str]]) -> None:
    """`automodel eval` on the run's own questions, against transformers' generation turn by turn."""
    (home / "tools.yaml").write_text(EVAL)
    done = automodel(home, "eval", "grpo_smollm2_tools", "-c", "tools.yaml", "--alone")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((home / "runs/grpo_smollm2_tools/eval/tools.json").read_text())["models"]
    (items,) = [outcome["answers"]["items"] for outcome in found.values()]
    export = home / "runs/grpo_smollm2_tools/export"
    tokenizer, model = AutoTokenizer.from_pretrained(export), AutoModelForCausalLM.from_pretrained(export)
    calculator, played = Calculator(pattern="([0-9a-zA-Z])", max_turns=2), 0
    for item in items:
        messages = [*before, {"role": "user", "content": item["question"]}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        for turn in range(2):
            drawn = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, len(ids) :].tolist()
            text = tokenizer.decode(drawn, skip_special_tokens=True)
            answer = calculator.step([{"role": "assistant", "content": text}], {}, None)
            if turn or answer.done or len(drawn) == 16:
                break
            said = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in answer.observations)
            between = f"<|end|>{said}<|assistant|>".removeprefix(
                "<|end|>" if drawn[-1] == tokenizer.eos_token_id else ""
            )
            ids = [*ids, *drawn, *tokenizer(between, add_special_tokens=False)["input_ids"]]
            played += 1
        assert item["responses"] == [text]
    assert played
