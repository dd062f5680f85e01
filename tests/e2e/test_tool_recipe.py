"""The bundled recipe of a small model that learns to use a calculator, on a shrunken model of random weights."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.command import automodel, metrics
from tests.e2e.test_grpo import samples_of

MODEL = (
    "model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2, "
    "num_key_value_heads: 1, vocab_size: 354, eos_token_id: [1, 100, 101, 102, 103, 104, 105]"
)
SHRUNKEN = [  # with the byte tokenizer a character is a token
    "model.pretrained=null",
    f"model.config={{{MODEL}}}",
    "rollout.environment.pattern='([0-9a-zA-Z])'",  # random weights make no other call; of a digit it is one
    "model.tokenizer._target_=automodel_cli.models.tokenizer.ByteTokenizer",
    *("train.max_steps=1", "lr_scheduler.warmup_steps=0", "logging.report=false"),
    *("data.task.num_train=40", "data.task.num_validation=2", "rollout.show_every=null"),
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
    assert "the mean of 2 held-out prompts" in done.stdout
