"""Initializations of `peft`: the same first adapters, the base at step 0, and files of plain LoRA."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.builder import build_part
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lora import adapters as lora
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.training.checkpoint.state_dict import model_state
from tests.exports import adapted_part, logprobs_of, logprobs_of_files, nudged
from tests.tiny import build_hf, token_row

IDS = token_row(12, 4).tolist()


@pytest.mark.parametrize("method", ["pissa", "olora"])
def test_adapters_begin_as_those_of_peft_on_the_unchanged_base(method: str, tmp_path: Path):
    build_hf("llama").save_pretrained(tmp_path)
    part, _ = adapted_part(tmp_path, LoRAConfig(rank=4, alpha=12.0, init_lora_weights=method))
    base = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    plain = logprobs_of(base, IDS)
    torch.testing.assert_close(logprobs_of(part, IDS), plain, atol=1e-5, rtol=0)
    wrapped = dict(lora.wrappers(part.model))
    settings = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], init_lora_weights=method)
    theirs = dict(lora.wrappers(peft.get_peft_model(base, settings).base_model.model))
    assert theirs
    for name, layer in theirs.items():
        for own, want in zip(lora.matrices_of(name, wrapped[name]), lora.matrices_of(name, layer), strict=True):
            torch.testing.assert_close(own[1], want[1], rtol=1e-5, atol=1e-6)
            assert own[1].abs().max() > 0


@pytest.mark.parametrize(
    "choice",
    [
        {"init_lora_weights": "pissa", "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"k_proj": 3.0}},
        {"init_lora_weights": "pissa_niter_4", "use_rslora": True, "rank_pattern": {"q_proj": 8}},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "gaussian"},
    ],
    ids=lambda choice: choice["init_lora_weights"],
)
def test_peft_and_the_merged_export_have_the_log_probs_and_a_run_continues(choice, tmp_path: Path):
    build_hf("llama").save_pretrained(tmp_path / "base")
    config = LoRAConfig(rank=4, alpha=6.0, **choice)
    part, model = adapted_part(tmp_path / "base", config)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    plain = logprobs_of(base, IDS)
    nudged(part)
    ours = logprobs_of(part, IDS)
    assert (ours - plain).abs().max() > 0.02
    with lora.adapters_off([part.model]):
        torch.testing.assert_close(logprobs_of(part, IDS), plain, atol=1e-6, rtol=0)
    theirs, merged = logprobs_of_files(part, model, base, tmp_path, IDS)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours, merged, atol=1e-5, rtol=0)
    further, _ = adapted_part(tmp_path / "base", LoRAConfig(pretrained=str(tmp_path / "adapter")))
    torch.testing.assert_close(logprobs_of(further, IDS), ours, atol=1e-5, rtol=0)
    saved = {name for name in model_state([part]) if ".initial." in name}
    assert bool(saved) == config.starts_at_weights


@pytest.mark.parametrize(
    ("fields", "code", "fix"),
    [
        ({"init_lora_weights": "eva"}, "invalid_value", "model.lora.init_lora_weights=default"),
        ({"init_lora_weights": "pissa", "use_dora": True}, "unsupported_combination", None),
        ({"init_lora_weights": "pissa", "target_parameters": "all-experts"}, "unsupported_combination", None),
        ({"init_lora_weights": "pissa", "rank": 999}, "out_of_range", None),
        ({"init_lora_weights": "orthogonal", "rank": 5}, "not_divisible", "model.lora.rank=6"),
    ],
)
def test_what_does_not_work_is_refused(fields, code: str, fix: str | None, tmp_path: Path):
    build_hf("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        build_part(ModelConfig(pretrained=str(tmp_path), lora=LoRAConfig(**fields)))
    assert refusal.value.code == code and fix in (None, refusal.value.fix)
