"""Adapters on fused experts: gradients against materialized updates, files against `peft`, exports, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.expert_parallel.low_rank import ADAPTERS
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.export import export_hf
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lora import adapters as lora
from automodel_cli.models.lora import experts as expert_lora
from automodel_cli.models.lora import export as lora_export
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.moe_config import MoEConfig
from tests.errors import raises
from tests.exports import verify_export
from tests.tiny import build_hf, packed_batch, reference_logprobs, token_row

ROWS = [[token_row(9), token_row(6, 1)]]
FAMILIES = ["qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral"]


def trained(folder: Path, family: str = "qwen3_moe", steps: int = 3, **fields) -> tuple[ModelPart, ModelConfig]:
    """A base on disk, and a part whose adapters were trained."""
    build_hf(family, num_hidden_layers=2).save_pretrained(folder)
    options = {"rank": 3, "alpha": 6.0, "target_modules": [], "target_parameters": "all-experts", **fields}
    config = ModelConfig(pretrained=str(folder), lora=LoRAConfig(**options))
    part = build_part(config)
    load_weights(part, config, device="cpu", seed=0)
    batch = packed_batch(ROWS)
    optimizer = torch.optim.SGD([p for p in part.parameters() if p.requires_grad], lr=0.5)
    for _ in range(steps):
        part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT.mean().neg().backward()
        optimizer.step()
        optimizer.zero_grad()
    return part, config


class _Loop(torch.nn.Module):
    """The family's own loop over experts, with parameters that a caller replaces."""

    def __init__(self, loop, experts):
        super().__init__()
        self.loop, self.inner = loop, experts

    def forward(self, *arguments):
        return self.loop(self.inner, *arguments)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_of_materialized_updates(family: str, tmp_path: Path):
    part, _ = trained(tmp_path, family)
    for _, experts in expert_lora.adapted(part.model):
        torch.manual_seed(1)
        exact = build_hf(family, num_hidden_layers=2)
        loop = type(next(m for m in exact.modules() if type(m).__name__ == type(experts).__name__)).forward.__wrapped__
        hidden = torch.randn(20, 64, requires_grad=True)
        index = torch.randint(0, 8, (20, 2))
        weight = torch.rand(20, 2, requires_grad=True)
        inputs = [hidden, weight, *(experts._parameters[name] for name in ADAPTERS)]
        got = torch.autograd.grad(experts(hidden, index, weight).square().sum(), inputs)
        base = {n: p.detach() for n, p in experts.named_parameters() if n not in ADAPTERS}
        for name in ("gate_up_proj", "down_proj"):
            a, b = inputs[2:4] if name == "gate_up_proj" else inputs[4:]
            update = 2.0 * torch.einsum("eor,eri->eoi", b, a)
            base[name] = base[name] + (update.mT if experts.is_transposed else update)

        module = _Loop(loop, experts)
        want = functional_call(module, {f"inner.{n}": v for n, v in base.items()}, (hidden, index, weight))
        want = torch.autograd.grad(want.square().sum(), inputs)
        for ours, theirs in zip(got, want, strict=True):
            assert (ours - theirs).abs().max() <= 2e-5 * theirs.abs().max()


def test_patterns_give_experts_pefts_ranks_and_scales(tmp_path: Path):
    patterns = {"rank_pattern": {"layers.1.mlp.experts.*": 5, "q_proj": 2}, "alpha_pattern": {"experts.*": 9.0}}
    part, config = trained(tmp_path / "base", target_modules=["q_proj"], **patterns)
    assert [len(experts.gate_up_proj_lora_A[0]) for _, experts in expert_lora.adapted(part.model)] == [3, 5]
    lora_export.save_adapters([part], config.lora, tmp_path / "adapter", base_model=str(tmp_path / "base"), write=True)
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    ids = token_row(12, 4)
    batch = packed_batch([[ids]])
    with torch.no_grad():
        ours = part.eval()(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT[0]
        theirs = reference_logprobs(model(input_ids=ids[None]).logits[0], batch.labels_BT[0])
        with model.disable_adapter():
            base = reference_logprobs(model(input_ids=ids[None]).logits[0], batch.labels_BT[0])
    assert (ours - theirs).abs().max() < 1e-5 and (ours - base).abs().max() > 0.1
    further = ModelConfig(pretrained=str(tmp_path / "base"), lora=LoRAConfig(pretrained=str(tmp_path / "adapter")))
    continued = build_part(further)
    load_weights(continued, further, device="cpu", seed=7)
    for (name, param), other in zip(part.named_parameters(), continued.parameters(), strict=True):
        assert torch.equal(param, other), name
    with raises(ConfigError, "not_supported", keys=("lora.rank_pattern",), values=("5", "3")):
        trained(tmp_path / "other", rank_pattern={"gate_up_proj": 5})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("modules", [[], "all-linear"])
def test_peft_loads_the_files_and_computes_the_same(family: str, modules, tmp_path: Path):
    completely = ["lm_head", "norm"] if modules else []
    part, config = trained(tmp_path / "base", family, target_modules=modules, modules_to_save=completely)
    lora_export.save_adapters([part], config.lora, tmp_path / "adapter", base_model=str(tmp_path / "base"), write=True)
    fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    own = peft.get_peft_model_state_dict(model)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert own.keys() == saved.keys()
    assert all(torch.equal(own[name], saved[name]) for name in own)
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_parameters"] == [
        "experts.down_proj",
        "experts.gate_up_proj",
    ]
    further = ModelConfig(pretrained=str(tmp_path / "base"), lora=LoRAConfig(pretrained=str(tmp_path / "adapter")))
    continued = build_part(further)
    load_weights(continued, further, device="cpu", seed=7)
    for (name, param), other in zip(part.named_parameters(), continued.parameters(), strict=True):
        assert torch.equal(param, other) and param.requires_grad == other.requires_grad, name
    ids = token_row(12, 4)
    batch = packed_batch([[ids]])
    part.eval()
    with torch.no_grad():
        ours = part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT[0]
        theirs = reference_logprobs(model(input_ids=ids[None]).logits[0], batch.labels_BT[0])
        with model.disable_adapter():
            base = reference_logprobs(model(input_ids=ids[None]).logits[0], batch.labels_BT[0])
        with lora.adapters_off([part.model]):
            off = part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT[0]
    assert (ours - theirs).abs().max() < 1e-5 and (completely or (off - base).abs().max() < 1e-5)
    assert (ours - base).abs().max() > 1e-3  # so the adapters do matter


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_merged_export_equals_the_trained_model(family: str, tmp_path: Path):
    part, config = trained(tmp_path / "base", family, use_rslora=True)
    export_hf([part], config, None, tmp_path / "out")
    prompts = [token_row(12, 4).tolist()]
    assert verify_export(tmp_path / "out", [part], prompts) < 1e-5
    assert verify_export(tmp_path / "base", [part], prompts) > 1e-3


def test_only_the_adapters_of_the_selected_experts_train(tmp_path: Path):
    names = ["layers.1.mlp.experts.gate_up_proj", "layers.1.mlp.experts.down_proj"]
    part, _ = trained(tmp_path, steps=0, target_parameters=names)
    trained_names = [name for name, param in part.named_parameters() if param.requires_grad]
    assert trained_names == [f"model.model.layers.1.mlp.experts.{name}" for name in ADAPTERS]


@pytest.mark.parametrize(
    ("family", "targets", "code"),
    [
        ("llama", "all-experts", "not_supported_by_model"),
        ("qwen3_moe", ["experts.up"], "unknown_name"),
        ("qwen3_moe", ["experts.gate_up_proj"], "not_supported"),
    ],
)
def test_targets_that_no_expert_has(family: str, targets, code: str, tmp_path: Path):
    with raises(ConfigError, code):
        trained(tmp_path, family, target_parameters=targets)


def test_experts_that_are_no_gated_mlp_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(expert_lora.GatedExperts, "of", lambda *_: None)
    with raises(ConfigError, "not_supported_by_model", keys=("lora.target_parameters",)):
        trained(tmp_path)


@pytest.mark.parametrize("fields", [{"target_parameters": []}, {"target_parameters": "experts"}])
def test_the_form_of_targets(fields):
    with pytest.raises(ConfigError) as error:
        LoRAConfig(**fields)
    assert error.value.keys == ("target_parameters",)


def test_settings_that_adapters_on_experts_do_not_support():
    with raises(ConfigError, "unsupported_combination", keys=("dropout", "target_parameters")):
        LoRAConfig(target_parameters="all-experts", dropout=0.1)
    with raises(ConfigError, "unsupported_combination", keys=("moe.experts_implementation", "lora.target_parameters")):
        ModelConfig(
            pretrained="x",
            lora=LoRAConfig(target_parameters="all-experts"),
            moe=MoEConfig(experts_implementation="eager"),
        )


@pytest.mark.parametrize("other", [{"exclude_modules": ["q_proj"]}, {"layers_to_transform": [0]}])
def test_options_that_do_not_reach_experts_are_refused(other):
    with raises(ConfigError, "unsupported_combination", keys=(next(iter(other)), "target_parameters")):
        LoRAConfig(target_parameters="all-experts", **other)
