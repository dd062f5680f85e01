"""Rows of new tokens beside adapters: files that `peft` loads, merged exports, and further training."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.export import export_hf
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lora import adapters as lora
from automodel_cli.models.lora import export as lora_export
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.tokenizer import PretrainedTokenizer
from tests.exports import logprobs_of, nudged
from tests.unit.models.test_new_tokens import SIZE, model_folder

IDS = [5, SIZE, 9, SIZE + 1, 30, SIZE, 7, SIZE + 2, 3]
NODE = PretrainedTokenizer(add_tokens=("<think>", "zebra"), add_special_tokens=("<|plan|>",))


def _part(base: str, config: LoRAConfig, node: PretrainedTokenizer | None) -> tuple[ModelPart, ModelConfig]:
    model = ModelConfig(pretrained=base, lora=config, tokenizer=node)
    part = build_part(model)
    load_weights(part, model, device="cpu", seed=0)
    return part.eval(), model


@pytest.mark.parametrize(
    ("family", "tied", "fields"),
    [
        ("llama", True, {}),
        ("llama", False, {"use_dora": True}),
        ("gemma3_text", True, {"init_lora_weights": "pissa"}),
        ("llama", False, {"modules_to_save": ["lm_head"]}),
    ],
)
def test_peft_and_the_merged_export_have_the_log_probs_and_a_run_continues(family, tied, fields, tmp_path: Path):
    folder = model_folder(tmp_path / "base", family=family, tie_word_embeddings=tied)
    config = LoRAConfig(rank=4, alpha=8.0, **fields)
    part, model = _part(folder, config, NODE)
    num_rows = part.model.config.vocab_size
    trained = {name for name, param in part.named_parameters() if param.requires_grad and ".lora_" not in name}
    assert len(trained) == (1 if tied else 2)
    ours = logprobs_of(nudged(part), IDS)
    lora_export.save_adapters([part], config, tmp_path / "adapter", base_model=folder, write=True)
    export_hf([part], model, None, tmp_path / "merged", title="t")
    base = AutoModelForCausalLM.from_pretrained(folder)
    base.resize_token_embeddings(num_rows)
    theirs = logprobs_of(peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval(), IDS)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert merged.config.tie_word_embeddings == tied
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours, logprobs_of(merged, IDS), atol=1e-5, rtol=0)
    further, _ = _part(folder, LoRAConfig(pretrained=str(tmp_path / "adapter")), NODE)
    torch.testing.assert_close(logprobs_of(further, IDS), ours, atol=1e-5, rtol=0)


def test_listed_rows_train_without_new_tokens(tmp_path: Path):
    folder = model_folder(tmp_path / "base", tie_word_embeddings=True)
    config = LoRAConfig(rank=4, trainable_token_indices=[9, 3])
    part, _ = _part(folder, config, None)
    base = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = [3, 9, 4, 9, 20]
    plain = logprobs_of(base, ids)
    torch.testing.assert_close(logprobs_of(part, ids), plain, atol=1e-6, rtol=0)
    ours = logprobs_of(nudged(part), ids)
    with lora.adapters_off([part.model]):
        torch.testing.assert_close(logprobs_of(part, ids), plain, atol=1e-6, rtol=0)
    lora_export.save_adapters([part], config, tmp_path / "adapter", base_model=folder, write=True)
    theirs = logprobs_of(peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval(), ids)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"trainable_token_indices": [SIZE]}, "out_of_range"),
        ({"trainable_token_indices": [1], "target_modules": ["embed_tokens"]}, "unsupported_combination"),
    ],
)
def test_what_does_not_work_is_refused(fields, code: str, tmp_path: Path):
    with pytest.raises(ConfigError) as refusal:
        _part(model_folder(tmp_path), LoRAConfig(**fields), None)
    assert refusal.value.code == code
