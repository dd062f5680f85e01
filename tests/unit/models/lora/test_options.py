"""Choices of layers and ranks, modules trained completely, and adapters on disk, against peft."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import one_document
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.export import export_hf
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lora import adapters as lora
from automodel_cli.models.lora import export as lora_export
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.model_part import ModelPart
from tests.tiny import build_hf

IDS = list(range(3, 19))


def _part(base: Path, config: LoRAConfig, seed: int = 0) -> ModelPart:
    model = ModelConfig(pretrained=str(base), lora=config)
    part = build_part(model)
    load_weights(part, model, device="cpu", seed=seed)
    return part.eval()


def _trained(part: ModelPart) -> ModelPart:
    generator = torch.Generator().manual_seed(0)
    for param in part.parameters():
        if param.requires_grad:
            param.data.add_(torch.randn(param.shape, generator=generator), alpha=0.05)
    return part


def _logprobs(model: object) -> torch.Tensor:
    ids = torch.tensor([IDS])
    logits = model(ids).logits.log_softmax(-1)[0, :-1]  # type: ignore[operator]
    return logits.gather(-1, ids[0, 1:, None])[:, 0].detach()


CHOICES = [
    (False, {"exclude_modules": ["down_proj"], "layers_to_transform": [1], "rank_pattern": {"q_proj": 8}}),
    (False, {"modules_to_save": ["lm_head", "input_layernorm"], "alpha_pattern": {"k_proj": 4.0}}),
    (True, {"modules_to_save": ["lm_head", "embed_tokens"], "use_rslora": True}),
]


@pytest.mark.parametrize(("tied", "choice"), CHOICES)
def test_peft_loads_what_was_trained_and_a_new_run_continues_it(tied, choice, tmp_path: Path):
    build_hf("llama", tie_word_embeddings=tied).save_pretrained(tmp_path / "base")
    config = LoRAConfig(rank=4, **choice)
    part = _trained(_part(tmp_path / "base", config))
    lora_export.save_adapters([part], config, tmp_path / "adapter", base_model=str(tmp_path / "base"), write=True)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    plain = _logprobs(base)
    theirs = _logprobs(peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval())
    batch = one_document(IDS)
    ours = part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT[0, :-1].detach()
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert (ours - plain).abs().max() > 0.05
    continued = _part(tmp_path / "base", LoRAConfig(pretrained=str(tmp_path / "adapter")), seed=7)
    trained = dict(part.named_parameters())
    for name, param in continued.named_parameters():
        assert torch.equal(param, trained[name]) and param.requires_grad == trained[name].requires_grad, name
    if choice.get("modules_to_save"):
        model = ModelConfig(pretrained=str(tmp_path / "base"), lora=config)
        export_hf([part], model, None, tmp_path / "merged", title="t")
        merged = _logprobs(AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval())
        torch.testing.assert_close(ours, merged, atol=1e-5, rtol=0)


def test_layers_and_ranks_are_those_that_were_chosen(tmp_path: Path):
    build_hf("llama").save_pretrained(tmp_path)
    part = _part(tmp_path, LoRAConfig(rank=4, **CHOICES[0][1]))
    for name, layer in lora.wrappers(part.model):
        assert ".layers.1." in name and "down_proj" not in name
        assert layer.r["default"] == (8 if name.endswith("q_proj") else 4)


REFUSED = [
    ({"exclude_modules": ["down_poj"]}, "unknown_name", "'model.lora.exclude_modules=[down_proj]'"),
    ({"layers_to_transform": [0, 99]}, "out_of_range", "model.lora.layers_to_transform=[0]"),
    (
        {"rank_pattern": {"q_poj": 2, "v_proj": 3}},
        "unknown_name",
        "model.lora.rank_pattern={} 'model.lora.rank_pattern={q_proj: 2, v_proj: 3}'",
    ),
    ({"modules_to_save": ["lm_hed"]}, "unknown_name", "'model.lora.modules_to_save=[lm_head]'"),
    ({"modules_to_save": ["mlp"]}, "unsupported_combination", "model.lora.modules_to_save=[]"),
    ({"modules_to_save": ["lm_head"]}, "requires_setting", "'model.lora.modules_to_save=[lm_head,embed_tokens]'"),
    ({"pretrained": "/nowhere"}, "model_not_found", "model.lora.pretrained=null"),
]


@pytest.mark.parametrize(("fields", "code", "fix"), REFUSED)
def test_what_does_not_fit_the_model_is_refused(fields, code, fix, tmp_path: Path):
    build_hf("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        build_part(ModelConfig(pretrained=str(tmp_path), lora=LoRAConfig(**fields)))
    assert (refusal.value.code, refusal.value.fix) == (code, fix)


def test_values_are_checked_without_a_model():
    for fields, code in [
        ({"rank_pattern": {"a": 0}}, "out_of_range"),
        ({"alpha_pattern": {"a": 0.0}}, "out_of_range"),
        ({"layers_to_transform": [-1]}, "out_of_range"),
        ({"target_modules": ".*q", "exclude_modules": ["q"]}, "unsupported_combination"),
        ({"pretrained": "a/b", "rank": 4}, "mutually_exclusive"),
        ({"target_parameters": "all-experts", "exclude_modules": ["q_proj"]}, "unsupported_combination"),
    ]:
        with pytest.raises(ConfigError) as refusal:
            LoRAConfig(**fields)
        assert refusal.value.code == code


def test_an_adapter_of_another_model_or_kind_is_refused(tmp_path: Path):
    build_hf("llama").save_pretrained(tmp_path / "base")
    part = _part(tmp_path / "base", LoRAConfig(rank=4))
    lora_export.save_adapters([part], LoRAConfig(rank=4), tmp_path / "a", base_model="", write=True)
    build_hf("llama", num_hidden_layers=1).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError) as refusal:
        _part(tmp_path / "other", LoRAConfig(pretrained=str(tmp_path / "a")))
    assert refusal.value.code == "not_supported_by_model"
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(settings | {"lora_bias": True}))
    with pytest.raises(ConfigError) as refusal:
        _part(tmp_path / "base", LoRAConfig(pretrained=str(tmp_path / "a")))
    assert refusal.value.code == "not_supported" and "lora_bias" in refusal.value.message
