"""Adapters: base frozen, step 0 is the base, files that `peft` loads, a merged export equal to the live model."""

from __future__ import annotations

import sys
from pathlib import Path

import peft
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.export import export_hf, rounds_weights
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lora import adapters as lora
from automodel_cli.models.lora import export as lora_export
from automodel_cli.models.lora import targets as lora_targets
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.probes.tiny_model import build_small, shrink
from automodel_cli.models.transformers_compat import meta_model
from automodel_cli.pipelining.cut.cut_stage import cut_stage
from automodel_cli.pipelining.cut.split_check import check_split
from tests.errors import raises
from tests.exports import verify_export
from tests.tiny import FAMILIES, build_hf, packed_batch, tiny_config, tiny_fields, token_row

ROWS = [[token_row(9), token_row(6, 1)]]


def _trained(folder: Path, family: str = "qwen3_moe", **fields) -> tuple[ModelPart, ModelConfig]:
    """A base on disk, and a part whose adapters are as they begin."""
    if family in FAMILIES:
        build_hf(family).save_pretrained(folder)
    else:
        build_small(shrink(CONFIG_MAPPING[family]()), AutoModelForCausalLM.from_config).save_pretrained(folder)
    config = ModelConfig(pretrained=str(folder), lora=LoRAConfig(rank=4, alpha=8.0, **fields))
    part = build_part(config)
    load_weights(part, config, device="cpu", seed=0)
    return part, config


def _step(part: ModelPart) -> None:
    batch = packed_batch(ROWS)
    optimizer = torch.optim.SGD([p for p in part.parameters() if p.requires_grad], lr=0.5)
    for _ in range(3):
        part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT.mean().neg().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_only_adapters_train_and_step_zero_is_the_base(tmp_path: Path):
    part, config = _trained(tmp_path)
    trainable = [name for name, param in part.named_parameters() if param.requires_grad]
    assert trainable and all(".lora_A." in name or ".lora_B." in name for name in trainable)
    assert not any("lm_head" in name for name in trainable)
    base_config = ModelConfig(pretrained=config.pretrained)
    base = build_part(base_config)
    load_weights(base, base_config, device="cpu", seed=0)
    batch = packed_batch(ROWS)
    calls = [p(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT for p in (part, base)]
    assert torch.equal(*calls)
    frozen = {n: p.detach().clone() for n, p in part.named_parameters() if not p.requires_grad}
    _step(part)
    assert all(torch.equal(p, frozen[n]) for n, p in part.named_parameters() if not p.requires_grad)
    hub = {ModelPart.hub_name(name) for name in frozen}
    assert hub == {ModelPart.hub_name(name) for name, _ in base.named_parameters()}


@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3_text"])
def test_merged_export_equals_the_adapter_model(family: str, tmp_path: Path):
    part, config = _trained(tmp_path / "base", family, use_rslora=True)
    _step(part)
    export_hf([part], config, None, tmp_path / "out")
    prompts = [token_row(12, 4).tolist()]
    assert verify_export(tmp_path / "out", [part], prompts) < 1e-5
    assert verify_export(tmp_path / "base", [part], prompts) > 1e-3  # so the adapters do matter
    assert len(lora.wrappers(part.model)) > 0  # still injected


@pytest.mark.parametrize(("use_rslora", "want"), [(False, 8 / 4), (True, 8 / 4**0.5)])
def test_the_update_is_scaled_by_alpha_over_the_rank_or_its_root(use_rslora: bool, want: float, tmp_path: Path):
    """`W + scale * B @ A` through the layer itself: with A and B all ones, each input of 1 adds `scale * rank`."""
    part, _ = _trained(tmp_path, "llama", use_rslora=use_rslora)
    _, layer = lora.wrappers(part.model)[0]
    base, x = layer.get_base_layer(), torch.ones(1, layer.get_base_layer().in_features)
    with torch.no_grad():
        for matrix in (layer.lora_A["default"], layer.lora_B["default"]):
            matrix.weight.fill_(1.0)
        found = (layer(x) - base(x)) / (4 * base.in_features)
    assert found[0].tolist() == pytest.approx([want] * base.out_features, rel=1e-4)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2", "falcon"])
def test_peft_loads_what_we_save_and_the_merged_export_is_the_same(family: str, tmp_path: Path):
    part, config = _trained(tmp_path / "base", family)
    _step(part)
    export_hf([part], config, None, tmp_path / "merged")
    assert config.lora is not None and config.pretrained is not None
    lora_export.save_adapters([part], config.lora, tmp_path / "adapter", base_model=config.pretrained, write=True)
    base = AutoModelForCausalLM.from_pretrained(config.pretrained)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids = token_row(11, 3)[None]
    labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)
    with torch.no_grad():
        ours = part.eval()(input_ids=ids, labels=labels).logprobs_BT[:, :-1]
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
        theirs, exported = (
            m(input_ids=ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
            for m in (model, merged)
        )
    assert (ours - theirs).abs().max() < 1e-5 and (ours - exported).abs().max() < 1e-5


def test_adapters_do_not_depend_on_the_order_of_modules():
    fields = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2,
              "num_key_value_heads": 2, "vocab_size": 64}  # fmt: skip
    weights = []
    for layers in (2, 3):
        config = ModelConfig(config={**fields, "num_hidden_layers": layers}, lora=LoRAConfig(rank=2))
        part = build_part(config)
        load_weights(part, config, device="cpu", seed=5)
        weights.append(dict(part.named_parameters()))
    shared = [name for name in weights[0] if "lora_A" in name]
    assert shared and all(torch.equal(weights[0][name], weights[1][name]) for name in shared)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"rank": 0}, "out_of_range"),
        ({"alpha": 0.0}, "out_of_range"),
        ({"dropout": 1.0}, "out_of_range"),
        ({"target_modules": []}, "empty_value"),
    ],
)
def test_the_node_refuses(fields: dict, code: str):
    with raises(ConfigError, code, keys=tuple(fields)):
        LoRAConfig(**fields)


@pytest.mark.parametrize(
    ("targets", "fix"),
    [
        (["q_projj"], "[q_proj]"),
        (["q_proj", "key_proj"], "[q_proj,k_proj]"),
        (["self_attn.q_proj", "proj_of_nothing_at_all"], "[self_attn.q_proj]"),
        (["embeddings_of_words"], "all-linear"),
        (["norm"], "all-linear"),  # a module, but no linear layer
        ("q_proj", "all-linear"),  # a regular expression for whole names
    ],
)
def test_every_target_fits_a_linear_layer_or_is_refused(targets: list[str] | str, fix: str):
    with pytest.raises(ConfigError) as refusal:
        lora.inject(meta_model(tiny_config("llama"), dtype=torch.float32), LoRAConfig(rank=4, target_modules=targets))
    assert refusal.value.keys in (("lora.target_modules",), ("model.lora.target_modules",))
    assert refusal.value.code in ("unknown_name", "not_supported_by_model")
    assert str(refusal.value.fix).strip("'") == f"model.lora.target_modules={fix}"


STATE_SPACE = ("mamba.out_proj", "mixer.out_proj")
ALL_LINEAR = {
    "ctrl": (),  # Sequential: layers called 0 and 2, as decoder layers are
    "falcon": (),  # a linear layer of its own
    "gpt2": (),  # Conv1D
    "longcat_flash": ("down_proj", "gate_proj", "up_proj", "classifier", "experts"),  # the experts' names; a router
    "zamba2": STATE_SPACE,
}


@pytest.mark.parametrize("family", [*ALL_LINEAR, pytest.param("gemma3n_text", marks=pytest.mark.slow)])
def test_all_linear_is_pefts_but_for_layers_that_an_adapter_cannot_change(family: str):
    """Falcon-H1 and Mamba are refused by peft itself, which wants `out_proj` left out."""
    small = shrink(CONFIG_MAPPING[family]())
    ours, theirs = (meta_model(small, dtype=torch.float32) for _ in range(2))
    doubled = lora_targets.shared(ours)
    lora.inject(ours, LoRAConfig(rank=4))
    every = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    peft.inject_adapter_in_model(every, theirs)
    left_out = ("base_layer", *ALL_LINEAR.get(family, ()))
    want = {name for name, _ in lora.wrappers(theirs) if not name.endswith(left_out)}
    assert {name for name, _ in lora.wrappers(ours)} == want - doubled


@pytest.mark.parametrize("family", ["mamba", "falcon_h1"])
def test_all_linear_fits_families_with_layers_that_peft_refuses(family: str):
    model = meta_model(shrink(CONFIG_MAPPING[family]()), dtype=torch.float32)
    lora.inject(model, LoRAConfig(rank=4))
    assert {name.rpartition(".")[2] for name, _ in lora.wrappers(model)} >= {"in_proj"}


def test_an_adapter_around_a_weight_that_two_layers_have_is_refused():
    model = meta_model(shrink(CONFIG_MAPPING["zamba2"]()), dtype=torch.float32)
    fix = "model.lora.target_modules=all-linear"
    with raises(ConfigError, "not_supported_by_model", keys=("lora.target_modules",), fix=fix):
        lora.inject(model, LoRAConfig(rank=4, target_modules=["q_proj"]))


def test_qlora_without_bitsandbytes_names_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with raises(ConfigError, "missing_package", keys=("lora.quantization",), values=("bitsandbytes",)) as refusal:
        _trained(tmp_path, "llama", quantization="nf4")
    assert "pip install bitsandbytes" in str(refusal.value.fix)


def test_an_export_rounds_merges_of_other_pipeline_stages():
    """The first rank checks the export. Its stage may be the embedding alone."""
    fields = tiny_fields("llama", num_hidden_layers=2)
    for lora_config, rounds in ((LoRAConfig(rank=4), True), (None, False)):
        part = build_part(ModelConfig(config=fields, dtype="bfloat16", lora=lora_config))
        stage = cut_stage(part, check_split(part.model), layers=range(0), is_first=True, is_last=False)
        assert not lora.wrappers(stage.model)
        assert rounds_weights([stage]) == rounds
