"""Which layers `model.qat` quantizes, and the combinations that it rejects."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.qat.linear import quantized_layers, settle, switched
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.export import export_hf
from automodel_cli.models.checkpoint_io.export_files import add_quantization
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.fp8_config import Fp8Config, TransformerEngineConfig
from automodel_cli.models.lora import adapters as lora
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.mtp_config import MTPConfig
from automodel_cli.models.qat_config import QATConfig
from automodel_cli.pipelining.cut.cut_stage import cut_stage
from automodel_cli.pipelining.cut.split_check import check_split
from tests import tiny
from tests.errors import raises
from tests.exports import logprobs_of, nudged

PLAIN = QATConfig(export="plain")


def part_of(family="llama", qat=PLAIN, **fields):
    return build_part(ModelConfig(config=tiny.tiny_fields(family, **fields), qat=qat))


def chosen(part):
    return {name for name, _ in quantized_layers(part.model)}


def test_linear_layers_of_decoder_layers_are_quantized_and_nothing_else():
    part = part_of()
    assert len(chosen(part)) == tiny.NUM_LAYERS * 7
    assert type(part.model.lm_head) is nn.Linear
    assert part.quantization.ignored == ("lm_head",)
    assert {name for name, _ in part.named_parameters()} == {name for name, _ in part_of(qat=None).named_parameters()}


def test_names_select_and_exclude_layers():
    part = part_of(
        qat=replace(PLAIN, target_modules=["mlp.down_proj", "o_proj"], exclude_modules=["layers.0.mlp.down_proj"])
    )
    assert len(chosen(part)) == 2 * tiny.NUM_LAYERS - 1
    assert all(name.endswith(("down_proj", "o_proj")) for name in chosen(part))
    assert "model.layers.0.mlp.down_proj" in part.quantization.ignored


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules"])
def test_a_name_without_a_layer_is_rejected_with_the_nearest(key):
    with raises(ConfigError, "unknown_name", keys=(f"model.qat.{key}",), fix=f"'model.qat.{key}=[down_proj]'"):
        part_of(qat=replace(PLAIN, **{key: ["down_prj"]}))


def test_layers_whose_inputs_are_no_multiple_of_a_group_are_left_alone_and_counted(caplog):
    with caplog.at_level(logging.INFO):
        part = part_of(intermediate_size=72)
    assert not any(name.endswith("down_proj") for name in chosen(part))
    assert re.search(r"qat int4: 24 linear layers; not 4 with 72 inputs", caplog.text)
    with raises(ConfigError, "not_supported_by_model", keys=("qat.group_size",), fix="model.qat.group_size=null"):
        part_of(qat=replace(PLAIN, group_size=7))
    with raises(ConfigError, "not_supported_by_model", keys=("qat",), fix="model.qat=null"):
        part_of(
            qat=replace(PLAIN, exclude_modules=[f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")])
        )


@pytest.mark.parametrize(
    ("family", "options", "key", "fix"),
    [
        ("qwen3_moe", {"weight_dtype": "nvfp4"}, "weight_dtype", "mxfp4"),
        ("qwen3_moe", {"activation_dtype": "int8", "group_size": 16}, "activation_dtype", "none"),
        ("qwen3_moe", {"exclude_modules": ["mlp.experts"], "export": "compressed-tensors"}, "export", "plain"),
        ("gpt_oss", {"group_size": 16, "export": "compressed-tensors"}, "export", "plain"),
    ],
)
def test_experts_whose_export_no_reader_has_are_rejected(family, options, key, fix):
    with raises(ConfigError, "not_supported_by_model", keys=(f"qat.{key}",), fix=f"model.qat.{key}={fix}"):
        part_of(family, qat=replace(PLAIN, **options))


def test_layers_that_engines_join_share_their_factor_in_nvfp4():
    part = build_part(
        ModelConfig(config=tiny.tiny_fields("llama"), qat=replace(PLAIN, weight_dtype="nvfp4")), device="cpu"
    )
    attention = part.model.model.layers[0].self_attn
    with torch.no_grad():
        for param in part.parameters():
            nn.init.normal_(param)
        attention.k_proj.weight[0, 0] = 99.0
    amax = {name: layer.tensor_amax().item() for name, layer in quantized_layers(attention)}
    assert amax["q_proj"] == amax["k_proj"] == amax["v_proj"] == 99.0 > amax["o_proj"]


def test_fake_quantization_is_switched_in_a_context():
    part = part_of()
    with switched([part], active=False):
        assert not any(layer.qat.active for _, layer in quantized_layers(part))
    assert all(layer.qat.active for _, layer in quantized_layers(part))
    assert not part_of(qat=replace(PLAIN, fake_quant_after_n_steps=3)).quantization.active


def test_a_stage_without_layers_describes_the_quantized_export(tmp_path):
    pytest.importorskip("compressed_tensors")
    part = part_of(qat=QATConfig())
    stage = cut_stage(part, check_split(part.model), layers=range(0), is_first=True, is_last=False)
    assert not chosen(stage)
    described = []
    for written in (part, stage):
        (tmp_path / "config.json").write_text("{}")
        add_quantization(tmp_path, written)
        described.append(json.loads((tmp_path / "config.json").read_text()))
    assert described[0]["quantization_config"]["ignore"] == ["lm_head"]
    assert described[1] == described[0]


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"weight_dtype": "mxfp4", "activation_dtype": "fp8"}, ("activation_dtype", "weight_dtype")),
        ({"weight_dtype": "int8", "activation_dtype": "fp8"}, ("activation_dtype", "weight_dtype")),
        ({"weight_dtype": "fp8", "group_size": 32}, ("group_size", "weight_dtype")),
        ({"weight_dtype": "nvfp4", "group_size": 32}, ("group_size", "weight_dtype")),
        ({"weight_dtype": "int8", "activation_dtype": "int8", "group_size": 32}, ("group_size", "weight_dtype")),
    ],
)
def test_formats_that_no_reader_has_are_rejected(options, keys):
    with raises(ConfigError, "unsupported_combination", keys=keys):
        QATConfig(**options)


def test_the_default_group_of_int4_is_that_of_vllms_kernels():
    groups = {inputs: QATConfig(activation_dtype=inputs).weights_per_scale for inputs in ("none", "int8", "fp8")}
    assert groups == {"none": 32, "int8": 32, "fp8": 128}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fp8", Fp8Config(emulate=True)),
        ("mtp", MTPConfig()),
        ("transformer_engine", TransformerEngineConfig()),
    ],
)
def test_other_arithmetics_are_rejected(name, value):
    with raises(ConfigError, "unsupported_combination", keys=("qat", name)):
        ModelConfig(config=tiny.tiny_fields("llama"), qat=PLAIN, **{name: value})


@pytest.mark.parametrize(
    ("option", "value"),
    [("use_dora", True), ("dropout", 0.1), ("quantization", "nf4"), ("target_parameters", "all-experts")],
)
def test_adapters_that_are_no_part_of_the_weight_are_rejected(option, value):
    with raises(ConfigError, "unsupported_combination", keys=(f"lora.{option}", "qat")):
        ModelConfig(config=tiny.tiny_fields("llama"), qat=PLAIN, lora=LoRAConfig(**{option: value}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("weight_dtype", "adapters"),
    [
        ("int4", LoRAConfig(rank=4, rank_pattern={"q_proj": 8}, alpha_pattern={"k_proj": 3.0})),
        ("nvfp4", LoRAConfig(rank=4, init_lora_weights="pissa")),
        ("fp8", LoRAConfig(rank=4, target_modules=["q_proj", "embed_tokens", "lm_head"])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_transformers_reads_the_quantized_sum_of_base_and_adapter(weight_dtype, adapters, dtype, tmp_path):
    pytest.importorskip("compressed_tensors")
    config = ModelConfig(
        pretrained=str(tmp_path / "base"), dtype=dtype, lora=adapters, qat=QATConfig(weight_dtype=weight_dtype)
    )
    base = tiny.build_hf("llama", num_hidden_layers=2).to(getattr(torch, dtype))
    base.save_pretrained(tmp_path / "base")
    bound = 1e-5 if dtype == "float32" else 0.05
    part, ids, ours = exported_and_read(config, tmp_path, bound)
    with lora.adapters_off([part.model]):
        assert (logprobs_of(part, ids) - ours).abs().max() > 4 * bound


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize(
    "options",
    [
        {"group_size": 16},
        {"weight_dtype": "int8"},
        {"weight_dtype": "fp8"},
        {"weight_dtype": "mxfp4"},
        {"target_modules": ["mlp.experts"]},
    ],
    ids=str,
)
def test_transformers_reads_quantized_experts(family, options, tmp_path):
    pytest.importorskip("compressed_tensors")
    tiny.build_hf(family, num_hidden_layers=2, moe_intermediate_size=64).save_pretrained(tmp_path / "base")
    config = ModelConfig(pretrained=str(tmp_path / "base"), dtype="float32", qat=QATConfig(**options))
    part, ids, ours = exported_and_read(config, tmp_path, 1e-5)
    routers = [name for name in part.quantization.ignored if name.endswith("mlp.gate")]
    assert len(routers) == (2 if family == "qwen3_moe" else 1)
    with switched([part], active=False):
        assert (logprobs_of(part, ids) - ours).abs().max() > 1e-4


def exported_and_read(config, folder, bound):
    """Assert that transformers has the log-probs of the part from its export."""
    part = build_part(config)
    load_weights(part, config, device="cpu", seed=0)
    settle(part, getattr(torch, config.dtype))
    nudged(part.eval())
    ids = tiny.token_row(12, 4).tolist()
    ours = logprobs_of(part, ids)
    export_hf([part], config, None, folder / "export")
    read = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=config.dtype).eval()
    if config.qat.weight_dtype == "mxfp4":
        read.to(getattr(torch, config.dtype))  # transformers leaves experts of mxfp4 in bfloat16
    torch.testing.assert_close(logprobs_of(read, ids), ours, atol=bound, rtol=0, check_dtype=False)
    return part, ids, ours
