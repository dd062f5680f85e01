"""DoRA: gradients and outputs of `peft`, files that it loads, a merged export, and the memory-saving norm."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.lora import adapters as lora
from automodel_cli.models.lora import dora as lora_dora
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.probes.tiny_model import build_small, shrink
from tests.exports import adapted_part, logprobs_of, logprobs_of_files, nudged
from tests.tiny import build_hf, token_row

IDS = token_row(12, 4).tolist()


def _save_base(family: str, folder: Path) -> None:
    if family == "gpt2":
        model = build_small(shrink(CONFIG_MAPPING[family]()), AutoModelForCausalLM.from_config)
    else:
        model = build_hf(family)
    model.save_pretrained(folder)


@pytest.mark.parametrize(("family", "dropout"), [("llama", 0.0), ("gpt2", 0.0), ("llama", 0.5)])
def test_a_layer_has_the_output_and_the_gradients_of_peft(family: str, dropout: float, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(lora_dora, "_CHUNK", 64)  # several chunks of a small layer
    _save_base(family, tmp_path)
    part, _ = adapted_part(tmp_path, LoRAConfig(rank=4, use_dora=True, dropout=dropout))
    part = nudged(part.double())
    for name, layer in lora.wrappers(part.model)[:4]:
        ours = type(layer)
        of_peft = next(cls for cls in ours.__mro__ if cls.__module__.startswith("peft"))
        results = []
        for kind in (ours, of_peft):
            layer.__class__ = kind
            x = torch.randn(2, 5, layer.in_features, generator=torch.Generator().manual_seed(1), dtype=torch.double)
            x.requires_grad_(True)
            torch.manual_seed(0)
            y = layer(x)
            trained = [param for _, param in lora.matrices_of(name, layer)]
            results.append((y.detach(), *torch.autograd.grad(y.square().sum(), [x, *trained])))
        assert len(results[0]) == 5 and ours is not of_peft
        for own, theirs in zip(*results, strict=True):
            torch.testing.assert_close(own, theirs, rtol=1e-12, atol=1e-12 * theirs.abs().max().item())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peft_and_the_merged_export_have_the_log_probs_and_a_run_continues(family: str, tmp_path: Path):
    _save_base(family, tmp_path / "base")
    config = LoRAConfig(rank=4, alpha=8.0, use_dora=True)
    part, model = adapted_part(tmp_path / "base", config)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    plain = logprobs_of(base, IDS)
    torch.testing.assert_close(logprobs_of(part.eval(), IDS), plain, atol=1e-6, rtol=0)
    nudged(part)
    ours = logprobs_of(part, IDS)
    assert (ours - plain).abs().max() > 0.05
    with lora.adapters_off([part.model]):
        torch.testing.assert_close(logprobs_of(part, IDS), plain, atol=1e-6, rtol=0)
    theirs, merged = logprobs_of_files(part, model, base, tmp_path, IDS)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours, merged, atol=1e-5, rtol=0)
    further, _ = adapted_part(tmp_path / "base", LoRAConfig(pretrained=str(tmp_path / "adapter")))
    assert all(torch.equal(*pair) for pair in zip(part.parameters(), further.parameters(), strict=True))
    anew, _ = adapted_part(tmp_path / "merged", config)
    torch.testing.assert_close(logprobs_of(anew.eval(), IDS), ours, atol=1e-5, rtol=0)


def test_the_first_step_in_bfloat16_computes_the_base(tmp_path: Path):
    build_hf("llama").save_pretrained(tmp_path)
    part, _ = adapted_part(tmp_path, LoRAConfig(rank=4, use_dora=True), "bfloat16")
    _, layer = lora.wrappers(part.model)[0]
    x = torch.randn(3, layer.in_features, dtype=torch.bfloat16)
    assert torch.equal(layer(x), layer.get_base_layer()(x))


def test_experts_have_none():
    with pytest.raises(ConfigError) as refusal:
        LoRAConfig(use_dora=True, target_parameters="all-experts")
    assert (refusal.value.code, refusal.value.fix) == ("unsupported_combination", "model.lora.use_dora=false")
