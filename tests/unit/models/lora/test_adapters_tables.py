"""Adapters on the embedding and the head, tied or not: files that `peft` loads, and merged exports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.lora import adapters as lora
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.pipelining.cut.cut_stage import cut_stage
from automodel_cli.pipelining.cut.split_check import check_split
from tests.exports import adapted_part, logprobs_of, logprobs_of_files, nudged
from tests.tiny import build_hf, token_row

IDS = token_row(12, 4).tolist()


@pytest.mark.parametrize(
    ("family", "tied", "targets"),
    [
        ("llama", False, ["q_proj", "embed_tokens", "lm_head"]),
        ("llama", True, ["embed_tokens"]),
        ("llama", True, ["lm_head", "embed_tokens"]),
        ("gemma3_text", True, ["embed_tokens", "v_proj"]),  # its embedding has a scale
    ],
)
def test_peft_and_the_merged_export_have_the_log_probs_and_a_run_continues(family, tied, targets, tmp_path: Path):
    build_hf(family, tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    config = LoRAConfig(rank=4, alpha=8.0, target_modules=targets)
    part, model = adapted_part(tmp_path / "base", config)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    plain = logprobs_of(base, IDS)
    torch.testing.assert_close(logprobs_of(part, IDS), plain, atol=1e-6, rtol=0)
    nudged(part)
    ours = logprobs_of(part, IDS)
    assert (ours - plain).abs().max() > 0.02
    with lora.adapters_off([part.model]):
        torch.testing.assert_close(logprobs_of(part, IDS), plain, atol=1e-6, rtol=0)
    theirs, merged = logprobs_of_files(part, model, base, tmp_path, IDS)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert exported.lm_head.weight is not exported.get_input_embeddings().weight
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours, merged, atol=1e-5, rtol=0)
    further, _ = adapted_part(tmp_path / "base", LoRAConfig(pretrained=str(tmp_path / "adapter")))
    torch.testing.assert_close(logprobs_of(further, IDS), ours, atol=1e-6, rtol=0)


@pytest.mark.parametrize("fields", [{"use_dora": True}, {"dropout": 0.1}])
def test_what_peft_does_not_do_on_embeddings_is_refused(fields, tmp_path: Path):
    build_hf("llama").save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        adapted_part(tmp_path, LoRAConfig(target_modules=["embed_tokens"], **fields))
    assert refusal.value.code == "not_supported_by_model"


def test_stages_have_no_copies_of_an_adapter_on_a_tied_embedding(tmp_path: Path):
    build_hf("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    part, _ = adapted_part(tmp_path, LoRAConfig(rank=4, target_modules=["embed_tokens"]))
    with pytest.raises(ConfigError) as refusal:
        cut_stage(part, check_split(part.model), layers=range(1), is_first=True, is_last=False)
    assert (refusal.value.code, refusal.value.keys[1]) == ("unsupported_combination", "mesh.pp_size")
