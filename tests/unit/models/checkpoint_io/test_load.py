"""Building, loading, exporting: values, names, ties, buffers and refusals, against the library's own save and load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3VLMoeTextConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextModel

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.models import conversion_compat
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io import initialization
from automodel_cli.models.checkpoint_io.export import export_hf, rounds_weights, trained_values
from automodel_cli.models.checkpoint_io.export_check import Precision, measure_export_error
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.checkpoint_io.weight_stream import iter_hf_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.mtp_config import MTPConfig
from tests.errors import raises
from tests.exports import verify_export
from tests.tiny import FAMILIES, build_hf, packed_batch, tiny_config, tiny_fields, token_row

PROMPTS = [token_row(17, 1).tolist(), token_row(9, 2).tolist()]


def _loaded(config: ModelConfig, seed: int = 0) -> ModelPart:
    part = build_part(config)
    load_weights(part, config, device="cpu", seed=seed)
    return part


def _random(family: str = "llama", seed: int = 0, **extra) -> tuple[ModelPart, ModelConfig]:
    config = ModelConfig(config=tiny_fields(family, **extra))
    return _loaded(config, seed), config


@pytest.mark.parametrize("family", FAMILIES)
def test_load_equals_the_library_and_saves_the_same_keys(family: str, tmp_path: Path):
    model = build_hf(family)
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    part = _loaded(ModelConfig(pretrained=str(tmp_path)))
    tensors = [dict(m.named_parameters()) | dict(m.named_buffers()) for m in (model, part.model)]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    on_disk = {}
    for file in tmp_path.glob("*.safetensors"):
        with safe_open(file, "pt") as handle:
            on_disk |= {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118
    stream = [item for bucket in iter_hf_weights([part], bucket_bytes=100_000) for item in bucket]
    assert len(stream) == len(on_disk) == len(dict(stream))
    assert all(torch.equal(tensor, on_disk[name]) for name, tensor in stream)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_export_reloads_to_the_same_logprobs(family: str, tmp_path: Path):
    part, config = _random(family, seed=3)
    export_hf([part], config, None, tmp_path, summary="20 steps.", shard_bytes=200_000)
    assert verify_export(tmp_path, [part], PROMPTS) < 1e-5
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    assert not list(tmp_path.glob("part-*"))
    assert "20 steps." in (tmp_path / "README.md").read_text()
    assert part.training


def test_verify_export_sees_a_wrong_weight_and_a_broken_folder(tmp_path: Path):
    part, config = _random()
    export_hf([part], config, None, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.2.mlp.up_proj.weight"][:4] += 0.5
    save_file(tensors, file, metadata={"format": "pt"})
    assert verify_export(tmp_path, [part], PROMPTS) > 1e-4
    file.write_bytes(b"not a file")
    with raises(RunError, "export_mismatch", values=(tmp_path,)):
        verify_export(tmp_path, [part], PROMPTS)


def test_export_keeps_the_hubs_dtype_and_serves_older_readers(tmp_path: Path):
    build_hf("llama", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}).to(
        torch.bfloat16
    ).save_pretrained(tmp_path / "hub")
    config = ModelConfig(pretrained=str(tmp_path / "hub"))
    part = _loaded(config)
    assert part.model.dtype == torch.float32 and part.hub_dtype == torch.bfloat16
    before = {name: param.detach().clone() for name, param in part.named_parameters()}
    with torch.no_grad():  # master weights between two bf16 values, as after training
        for param in part.parameters():
            param.mul_(1.001)
    trained = {name: param.detach().clone() for name, param in part.named_parameters()}
    export_hf([part], config, None, tmp_path / "out")
    precision = Precision(torch.float32, rounds_weights([part]))
    found = measure_export_error(tmp_path / "out", PROMPTS, trained_values([part], PROMPTS), precision)
    assert found.passed and found.worst > 1e-5, "rounding to bfloat16 shows, and no more"
    assert all(torch.equal(param, trained[name]) for name, param in part.named_parameters())
    assert not torch.equal(before["model.lm_head.weight"], trained["model.lm_head.weight"])
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["torch_dtype"] == "bfloat16" and fields["rope_theta"] == 5000.0
    assert fields["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert fields["use_cache"] is True
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters["rope_theta"] == 5000.0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_tied_embeddings_stay_one_parameter():
    part, _ = _random("gemma3_text")
    assert part.model.lm_head.weight is part.model.get_input_embeddings().weight
    names = [name for bucket in iter_hf_weights([part]) for name, _ in bucket]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def test_random_weights_follow_the_family_and_the_seed():
    first, _ = _random("deepseek_v3", seed=1)
    again, _ = _random("deepseek_v3", seed=1)
    other, _ = _random("deepseek_v3", seed=2)
    deeper, _ = _random("deepseek_v3", seed=1, num_hidden_layers=5)
    reference = AutoModelForCausalLM.from_config(tiny_config("deepseek_v3"))
    state, deep_state = first.model.state_dict(), deeper.model.state_dict()
    for name, tensor in reference.state_dict().items():
        assert torch.equal(state[name], again.model.state_dict()[name]), name
        assert torch.equal(state[name], deep_state[name]), name  # a layer's numbers do not depend on its neighbours
        if tensor.numel() > 1000:
            assert state[name].std() == pytest.approx(tensor.std().item(), rel=0.15), name
            assert not torch.equal(state[name], other.model.state_dict()[name])
    buffers = dict(reference.named_buffers())
    assert buffers.keys() == dict(first.model.named_buffers()).keys()
    assert all(torch.equal(tensor, buffers[name]) for name, tensor in first.model.named_buffers())


class _Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1))
        self.register_buffer("factor", torch.empty(3), persistent=False)


class _Inner(PreTrainedModel):
    """Initialises its own buffer by an attribute that the outer model has not, and that of a layer below it."""

    config_class = LlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.width = 7.0
        self.register_buffer("table", torch.empty(2), persistent=False)
        self.layers = nn.ModuleList([_Scale(), _Scale()])
        self.post_init()

    def _init_weights(self, module):
        if module is self:
            self.table.fill_(self.width)
            for layer in self.layers:
                layer.factor.fill_(self.width + 1)
        elif isinstance(module, _Scale):
            module.weight.fill_(0)


class _Outer(PreTrainedModel):
    config_class, base_model_prefix = LlamaConfig, "model"

    def __init__(self, config):
        super().__init__(config)
        self.model = _Inner(config)
        self.post_init()

    def get_input_embeddings(self):
        return self.model


def test_buffers_are_set_by_the_model_that_is_nearest_above_them():
    """As Gemma-3n's and Falcon-H1's are. A stage of a pipeline lacks layers that the model sets as well."""
    with torch.device("meta"):
        whole, stage = _Outer(LlamaConfig()), _Outer(LlamaConfig())
    stage.model.layers[0]._buffers.clear()
    for model, unit, name, want in ((whole, "model", "table", 7.0), (stage, "model.layers.1", "factor", 8.0)):
        values = initialization._initialized(model, unit, 0, recurse=False)
        assert set(values[f"{unit}.{name}"].tolist()) == {want}


def test_building_allocates_nothing_and_leaves_the_global_rng():
    config = ModelConfig(config=tiny_fields("llama"))
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    part = build_part(config)
    assert all(param.is_meta for param in part.parameters())
    load_weights(part, config, device="cpu", seed=9)
    assert torch.equal(torch.rand(3), expected)


def test_bf16_storage_keeps_what_the_family_keeps_in_fp32():
    part = _loaded(ModelConfig(config=tiny_fields("deepseek_v3"), dtype="bfloat16"))
    dtypes = {name: tensor.dtype for name, tensor in part.model.state_dict().items()}
    kept = {name for name, dtype in dtypes.items() if dtype == torch.float32}
    patterns = part.model._keep_in_fp32_modules_strict  # with the gate since transformers 5.24
    assert kept and kept == {name for name in dtypes if any(pattern in name for pattern in patterns)}
    exported = {name: tensor.dtype for bucket in iter_hf_weights([part]) for name, tensor in bucket}
    assert exported == dtypes or {n for n, d in exported.items() if d == torch.float32} == kept


def test_a_trained_pad_token_keeps_its_gradient():
    """pad == eos, and eos is an input whose next token is trained: torch's padding_idx would drop its gradient."""
    part, _ = _random("llama", pad_token_id=2)
    row = torch.cat([token_row(5), torch.tensor([2]), token_row(4, 1)])
    batch = packed_batch([[row]])
    part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT.sum().backward()
    grad = part.model.get_input_embeddings().weight.grad
    assert grad is not None and grad[2].abs().max() > 0
    reference = AutoModelForCausalLM.from_config(tiny_config("llama", pad_token_id=2))
    assert reference.get_input_embeddings().padding_idx == 2  # the trap is still there


def test_missing_misshapen_and_absent_weights_are_named(tmp_path: Path):
    build_hf("llama").save_pretrained(tmp_path)
    config = ModelConfig(pretrained=str(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    lost = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with raises(ConfigError, "weights_mismatch", values=(1, "model.layers.1.mlp.up_proj.weight")):
        _loaded(config)
    tensors["model.layers.1.mlp.up_proj.weight"] = lost[:, :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with raises(ConfigError, "weights_mismatch", values=("model.layers.1.mlp.up_proj.weight",)):
        _loaded(config)
    (tmp_path / "model.safetensors").unlink()
    with raises(ConfigError, "unsupported_file_type", keys=("pretrained",), values=(tmp_path,)):
        _loaded(config)


def test_keys_without_a_place_are_reported(tmp_path: Path):
    build_hf("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"model.layers.4.mtp.weight": torch.zeros(3)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = ModelConfig(pretrained=str(tmp_path))
    report = load_weights(build_part(config), config, device="cpu", seed=0)
    assert report.unclaimed == ("model.layers.4.mtp.weight",)


@pytest.mark.parametrize(
    ("fields", "code", "key", "fix"),
    [
        ({}, "missing_key", "pretrained", "model.pretrained=HuggingFaceTB/SmolLM2-135M-Instruct"),
        (
            {"pretrained": "a/b", "config": {"model_type": "llama"}},
            "mutually_exclusive",
            "pretrained",
            "model.pretrained=null",
        ),
        ({"config": {"hidden_size": 8}}, "missing_key", "config", "model.config.model_type=llama"),
        (
            {"gguf_file": "x.gguf", "config": {"model_type": "llama"}},
            "mutually_exclusive",
            "gguf_file",
            "model.config=null",
        ),
        ({"pretrained": "a/x.gguf"}, "invalid_value", "pretrained", None),
        (
            {"pretrained": "a/b", "lm_head_chunk_size": 0},
            "out_of_range",
            "lm_head_chunk_size",
            "model.lm_head_chunk_size=null",
        ),
        ({"config": {"model_type": "llama"}, "revision": "main"}, "no_effect", "revision", "model.revision=null"),
        ({"pretrained": "a/b", "attn_implementation": ""}, "empty_value", "attn_implementation", None),
        (
            {"pretrained": "a/b", "mtp": MTPConfig(depths=2)},
            "no_effect",
            "mtp.depths",
            "model.mtp.depths=null",
        ),
    ],
)
def test_the_node_refuses(fields: dict, code: str, key: str, fix: str | None):
    with raises(ConfigError, code, keys=(key,), fix=fix) as refusal:
        ModelConfig(**fields)
    assert refusal.value.fix


@pytest.mark.parametrize(
    ("fields", "code", "key", "fix"),
    [
        ({"model_type": "lama"}, "unknown_name", "config.model_type", "model.config.model_type=llama"),
        ({"model_type": "llama", "hiden_size": 8}, "unknown_key", "config.hiden_size", "model.config.hidden_size=8"),
        ({"model_type": "qwen2", "num_layer": 8}, "unknown_key", "config.num_layer", None),
    ],
)
def test_a_random_models_config_is_checked(fields: dict, code: str, key: str, fix: str | None):
    with raises(ConfigError, code, keys=(key,), fix=fix):
        build_part(ModelConfig(config=fields))


def test_a_folder_that_is_none_and_an_unknown_attention_are_refused(tmp_path: Path):
    with raises(ConfigError, "model_not_found", keys=("pretrained",), values=(tmp_path,)):
        build_part(ModelConfig(pretrained=str(tmp_path)))
    with raises(ConfigError, "missing_file", keys=("gguf_file",), values=("x.gguf",)):
        build_part(ModelConfig(gguf_file=str(tmp_path / "x.gguf")))
    with raises(ConfigError, "not_supported_by_model", keys=("attn_implementation",), values=("flash_attention_9",)):
        build_part(ModelConfig(config=tiny_fields("llama"), attn_implementation="flash_attention_9"))


def test_a_checkpoint_in_a_format_that_is_not_dequantised_is_refused(tmp_path: Path):
    build_hf("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "awq"}}))
    with raises(ConfigError, "not_supported", keys=("pretrained",), values=("awq",)):
        build_part(ModelConfig(pretrained=str(tmp_path)))


def test_conversions_that_compare_shapes_are_settled_before_tensors_are_sharded():
    """The library would compare the experts of one rank with those of all ranks."""
    with torch.device("meta"):
        model = Qwen3VLMoeTextModel(Qwen3VLMoeTextConfig(num_hidden_layers=1, layer_types=["full_attention"]))
    mapping = get_checkpoint_conversion_mapping("qwen3_vl_moe")
    name = "layers.0.mlp.experts.gate_up_proj"
    stored = model.get_parameter(name)
    for tensor, steps in ((stored, []), (stored.transpose(1, 2), [False])):
        settled = conversion_compat.settled_transposes(mapping, model, {name: tensor})
        found = [entry for entry in settled if "gate_up_proj" in str(getattr(entry, "source_patterns", ""))]
        assert [step.check_dims for entry in found for step in entry.operations] == steps
    assert all(step.check_dims for entry in mapping for step in getattr(entry, "operations", ()))
