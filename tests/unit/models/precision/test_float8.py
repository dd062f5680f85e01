"""Which layers `model.fp8` converts, and that nothing but their products changes."""

from __future__ import annotations

import logging
import re

import pytest
import torch
from torch import nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.expert_parallel.apply import experts_modules
from automodel_cli.distributed.float8.grouped_gemm import arithmetic_of
from automodel_cli.distributed.float8.linear import Fp8Linear
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.checkpoint_io.weight_stream import iter_hf_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.fp8_config import Fp8Config, TransformerEngineConfig
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.moe_config import MoEConfig
from tests import tiny
from tests.errors import raises


def part_of(family="llama", *, fields=None, fp8=Fp8Config(emulate=True), **options):  # noqa: B008
    return build_part(ModelConfig(config=tiny.tiny_fields(family, **(fields or {})), fp8=fp8, **options))


def converted(part):
    return {name.removeprefix("model.model.layers.") for name, m in part.named_modules() if isinstance(m, Fp8Linear)}


def test_linear_layers_of_decoder_layers_are_converted_and_nothing_else():
    part = part_of()
    assert len(converted(part)) == tiny.NUM_LAYERS * 7
    assert type(part.model.lm_head) is nn.Linear
    assert {name for name, _ in part.named_parameters()} == {name for name, _ in part_of(fp8=None).named_parameters()}


def test_the_log_counts_what_is_left_alone_and_why(caplog):
    with caplog.at_level(logging.INFO):
        part = part_of(fields={"intermediate_size": 104}, fp8=Fp8Config(emulate=True, exclude_modules=["o_proj"]))
    names = {name.rpartition(".")[2] for name in converted(part)}
    assert names == {"q_proj", "k_proj", "v_proj"}
    assert "fp8 rowwise: 12 linear layers; not 4 skipped; not 8 of 64 x 104, no multiples of 16" in caplog.text
    with caplog.at_level(logging.INFO):
        part_of(fields={"intermediate_size": 80}, fp8=Fp8Config("mxfp8", emulate=True))
    assert "fp8 mxfp8: 16 linear layers; not 8 of 64 x 80, no multiples of 32" in caplog.text


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral"])
def test_experts_are_converted_and_routers_stay_as_they_are(family, caplog):
    with caplog.at_level(logging.INFO):
        part = part_of(family, fp8=Fp8Config(emulate=True, experts=True))
    names = converted(part)
    assert names and not any(
        name.rpartition(".")[2] == "gate" or "router" in name or ".experts" in name for name in names
    )
    experts = experts_modules(part)
    assert experts and all(arithmetic_of(module) is not None for module in experts)
    assert f"; the experts of {len(experts)} layers" in caplog.text
    if family == "deepseek_v3":
        assert "1.mlp.shared_experts.up_proj" in names


LEFT = {
    "not asked": ({"fp8": Fp8Config()}, r"fp8\.experts is false"),
    "no scale for each row": (
        {"fp8": Fp8Config(recipe="tensorwise", experts=True)},
        "a scale for each row, as tensorwise has not",
    ),
    "blocks": ({"fp8": Fp8Config("mxfp8", experts=True)}, "a scale for each row, as mxfp8 has not"),
    "another kernel": (
        {"moe": MoEConfig(experts_implementation="eager")},
        r"model\.moe\.experts_implementation=eager",
    ),
    "sizes": ({"fields": {"moe_intermediate_size": 24}}, "sizes of 24, 48, 64, not all multiples of 16"),
}


@pytest.mark.parametrize("case", LEFT)
def test_the_log_says_why_experts_are_left_alone(case, caplog):
    options, reason = LEFT[case]
    options = {"fp8": Fp8Config(emulate=True, experts=True), **options}
    with caplog.at_level(logging.INFO):
        part = part_of("qwen3_moe", **options)
    assert converted(part) and all(arithmetic_of(module) is None for module in experts_modules(part))
    assert re.search(rf"; not those of \d: .*{reason}", caplog.text)


def test_adapters_wrap_converted_layers_and_stay_as_they_are():
    part = part_of(lora=LoRAConfig(rank=4))
    assert all(name.endswith("base_layer") for name in converted(part))
    assert len(converted(part)) == tiny.NUM_LAYERS * 7


def test_weights_are_saved_as_they_were_loaded(tmp_path):
    model = tiny.build_hf("llama")
    model.save_pretrained(tmp_path)
    part = build_part(ModelConfig(pretrained=str(tmp_path), fp8=Fp8Config(emulate=True)))
    load_weights(part, ModelConfig(pretrained=str(tmp_path)), device=torch.device("cpu"), seed=0)
    saved = {name: weight for bucket in iter_hf_weights([part]) for name, weight in bucket}
    for name, weight in model.state_dict().items():
        assert torch.equal(saved[name], weight) and saved[name].dtype == torch.float32


REFUSED = {
    "a name that no layer has": (
        {"fp8": Fp8Config(exclude_modules=["lm_head"])},
        ("unknown_name", "model.fp8.exclude_modules", "down_proj"),
    ),
    "nothing left": (
        {"fields": {"hidden_size": 40, "head_dim": 12}},
        ("not_supported_by_model", "fp8", "LlamaForCausalLM"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_do_nothing_is_refused(case):
    options, (code, key, value) = REFUSED[case]
    with raises(ConfigError, code, keys=(key,), values=(value,)):
        part_of(**options)


def test_configs_that_contradict_it_are_refused():
    fields = {"config": tiny.tiny_fields("llama"), "fp8": Fp8Config()}
    with raises(ConfigError, "mutually_exclusive", keys=("fp8", "transformer_engine.linear")):
        ModelConfig(**fields, transformer_engine=TransformerEngineConfig())
    with raises(ConfigError, "unsupported_combination", keys=("fp8", "lora.quantization"), values=("nf4",)):
        ModelConfig(**fields, lora=LoRAConfig(quantization="nf4"))
    with raises(ConfigError, "invalid_choice", keys=("recipe",), values=("blockwise", "rowwise", "tensorwise")):
        Fp8Config(recipe="blockwise")
