"""Optional keys of `model` are refused where strategies, meshes and recipes do not support them."""

from __future__ import annotations

import pytest
import torch
from transformers import masking_utils, modeling_flash_attention_utils

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.config import DataConfig
from automodel_cli.distributed.config import DDPConfig, FSDP2Config, MegatronFSDPConfig
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.models import transformers_compat
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.fp8_config import Fp8Config, TransformerEngineConfig
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.mtp_config import MTPConfig
from automodel_cli.models.qat_config import QATConfig
from automodel_cli.run.checks.model_section_checks import (
    check_4bit_base,
    check_fp8,
    check_multi_token,
    check_packed_probe,
    check_qat,
    check_transformer_engine,
)
from automodel_cli.training.train_config import TrainConfig
from tests import tiny
from tests.errors import raises

PATCH = FSDP2Config(patch_is_packed_sequence=True)
ENGINE = TransformerEngineConfig()


def _model(**fields) -> ModelConfig:
    return ModelConfig(pretrained="x", **fields)


def test_the_packed_probe_is_patched_for_unpacked_rows_and_library_attention_only():
    unpacked, packed = DataConfig(path="x", packing="none"), DataConfig(path="x")
    check_packed_probe(PATCH, _model(attn_implementation="flash_attention_2"), unpacked)
    check_packed_probe(FSDP2Config(), _model(), packed)
    check_packed_probe(DDPConfig(), _model(), packed)
    with raises(ConfigError, "unsupported_combination", keys=("data.packing",), values=("best_fit",)):
        check_packed_probe(PATCH, _model(attn_implementation="flash_attention_2"), packed)
    with raises(ConfigError, "no_effect", keys=("model.attn_implementation",), values=("packed",)):
        check_packed_probe(PATCH, _model(), unpacked)


def test_an_assumed_answer_is_not_looked_up(monkeypatch):
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", masking_utils.find_packed_sequence_indices)
    monkeypatch.setattr(modeling_flash_attention_utils, "_is_packed_sequence", None)
    model = tiny.build_hf("llama").eval()
    ids = tiny.token_row(9)[None]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    searched = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    transformers_compat.assume_unpacked()
    assumed = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    assert not torch.allclose(searched[:, 4:], assumed[:, 4:], atol=1e-3)  # one document now
    assert not modeling_flash_attention_utils._is_packed_sequence(positions, batch_size=1)


REFUSED = {
    "linear under tp": (FSDP2Config(), {"tp_size": 2}, ("model.transformer_engine.linear", "mesh.tp_size")),
    "attention under cp": (FSDP2Config(), {"cp_size": 2}, ("model.transformer_engine.attention", "mesh.cp_size")),
    "compile": (FSDP2Config(enable_compile=True), {}, ("parallelizer.enable_compile", "model.transformer_engine")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_transformer_engine_refuses(case):
    parallelizer, sizes, keys = REFUSED[case]
    with raises(ConfigError, "unsupported_combination", keys=keys, values=sizes.values()) as caught:
        check_transformer_engine(parallelizer, _model(transformer_engine=ENGINE), MeshConfig(**sizes))
    assert caught.value.fix


def test_transformer_engine_is_accepted_elsewhere():
    attention_only = _model(transformer_engine=TransformerEngineConfig(linear=False, norm=False))
    check_transformer_engine(FSDP2Config(), attention_only, MeshConfig(tp_size=2, pp_size=2))
    check_transformer_engine(FSDP2Config(), _model(transformer_engine=ENGINE), MeshConfig(pp_size=2))
    check_transformer_engine(FSDP2Config(), _model(), MeshConfig(tp_size=2, cp_size=2))


REFUSED_4BIT = {
    "tp": (FSDP2Config(), {"tp_size": 2}, "mesh.tp_size"),
    "megatron": (MegatronFSDPConfig(), {}, "parallelizer"),
    "compile": (DDPConfig(enable_compile=True), {}, "parallelizer.enable_compile"),
}


@pytest.mark.parametrize("case", REFUSED_4BIT)
def test_a_4_bit_base_refuses(case):
    parallelizer, sizes, key = REFUSED_4BIT[case]
    model = _model(lora=LoRAConfig(quantization="nf4"))
    keys = ("model.lora.quantization", key)
    with raises(ConfigError, "unsupported_combination", keys=keys, values=("nf4", *sizes.values())) as caught:
        check_4bit_base(parallelizer, model, MeshConfig(**sizes))
    assert caught.value.fix
    check_4bit_base(parallelizer, _model(lora=LoRAConfig()), MeshConfig(**sizes))
    check_4bit_base(FSDP2Config(), model, MeshConfig(pp_size=2, cp_size=2, ep_size=2))


REFUSED_MTP = {
    "whole responses": (FSDP2Config(), "dpo", "model.mtp", "dpo"),
    "megatron": (MegatronFSDPConfig(), "sft", "parallelizer", "megatron_fsdp"),
    "sequence parallelism": (FSDP2Config(sequence_parallel=True), "sft", "parallelizer.sequence_parallel", "true"),
}


@pytest.mark.parametrize("case", REFUSED_MTP)
def test_multi_token_prediction_refuses(case):
    parallelizer, kind, key, value = REFUSED_MTP[case]
    with raises(ConfigError, "unsupported_combination", keys=("model.mtp", key), values=(value,)) as caught:
        check_multi_token(parallelizer, _model(mtp=MTPConfig()), kind)
    assert caught.value.fix
    check_multi_token(parallelizer, _model(), kind)
    check_multi_token(FSDP2Config(), _model(mtp=MTPConfig()), "sft")


def test_multi_token_prediction_refuses_adapters_and_files_that_do_not_have_it():
    for fields, code, key in (
        ({"lora": LoRAConfig()}, "unsupported_combination", "lora"),
        ({"gguf_file": "x.gguf"}, "unsupported_combination", "gguf_file"),
        ({"mtp": MTPConfig(depths=2)}, "no_effect", "mtp.depths"),
    ):
        with raises(ConfigError, code, keys=(key,)):
            _model(**{"mtp": MTPConfig(), **fields})
    with raises(ConfigError, "out_of_range", keys=("loss_weight",), values=(0,)):
        MTPConfig(loss_weight=0)
    with raises(ConfigError, "out_of_range", keys=("depths",), values=(0,)):
        MTPConfig(depths=0)


QAT = {
    "a parallelizer of others": (MegatronFSDPConfig(), "sft", "parallelizer", "megatron_fsdp"),
    "whole layers as graphs": (FSDP2Config(enable_compile=True), "sft", "parallelizer.enable_compile", "true"),
    "samples of an engine": (FSDP2Config(), "grpo", "model.qat", "grpo"),
}


@pytest.mark.parametrize("case", QAT)
def test_fake_quantization_refuses(case):
    parallelizer, kind, key, value = QAT[case]
    train = TrainConfig(global_batch_size=1, max_steps=10)
    with raises(ConfigError, "unsupported_combination", keys=(key,), values=(value,)):
        check_qat(parallelizer, _model(qat=QATConfig()), train, kind)
    check_qat(parallelizer, _model(), train, kind)
    check_qat(FSDP2Config(), _model(qat=QATConfig(fake_quant_after_n_steps=9)), train, "kd")
    with raises(ConfigError, "no_effect", keys=("train.max_steps",), values=(10,)):
        check_qat(FSDP2Config(), _model(qat=QATConfig(fake_quant_after_n_steps=10)), train, "sft")


FP8 = {
    "a parallelizer of others": (MegatronFSDPConfig(), "parallelizer", "megatron_fsdp"),
    "whole layers as graphs": (FSDP2Config(enable_compile=True), "parallelizer.enable_compile", "true"),
    "rows that DeepEP has sorted": (FSDP2Config(expert_dispatch="deepep"), "parallelizer.expert_dispatch", "deepep"),
}


@pytest.mark.parametrize("case", FP8)
def test_products_of_8_bits_refuse(case):
    parallelizer, key, value = FP8[case]
    model = _model(fp8=Fp8Config(experts=True))
    with raises(ConfigError, "unsupported_combination", keys=(key,), values=(value,)):
        check_fp8(parallelizer, model)
    check_fp8(parallelizer, _model())
    check_fp8(FSDP2Config(), model)
