"""Transformer Engine's adapter, run with a stand-in whose calls bind to the real package's signatures.

The package needs CUDA libraries to be imported. Its wheel's signatures are in tests/vectors/signatures.json
(scripts/signatures.py writes them), so a keyword that it does not have fails here. The arithmetic is torch's.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types

import pytest
import torch
from torch import nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.attention import transformer_engine as adapter
from automodel_cli.models.attention.packed import packed_attention
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.fp8_config import TransformerEngineConfig
from automodel_cli.models.lora_config import LoRAConfig
from tests import tiny
from tests.errors import raises
from tests.signatures import SIGNATURES, bind

LAYERS_ONLY = TransformerEngineConfig(attention=False)
_bind = functools.partial(bind, "transformer_engine")


class Linear(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        given = _bind("Linear.__init__", *args, **kwargs)
        place = {"device": given["device"], "dtype": given["params_dtype"]}
        self.weight = nn.Parameter(torch.empty(given["out_features"], given["in_features"], **place))
        if given["bias"]:
            self.bias = nn.Parameter(torch.empty(given["out_features"], **place))
        self.recipes = []

    def forward(self, *args, **kwargs):
        given = _bind("Linear.forward", *args, **kwargs)
        self.recipes.append(autocast.current)
        return nn.functional.linear(given["inp"], self.weight, getattr(self, "bias", None))


class RMSNorm(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()
        given = _bind("RMSNorm.__init__", *args, **kwargs)
        rest = given.pop("kwargs")
        _bind("ops.RMSNorm.__init__", given["normalized_shape"], **rest)
        self.weight = nn.Parameter(torch.empty(given["normalized_shape"], **rest))
        self.eps, self.offset = given["eps"], float(given["zero_centered_gamma"])

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (self.offset + self.weight)


class DotProductAttention:
    def __init__(self, *args, **kwargs):
        self.made = _bind("DotProductAttention.__init__", *args, **kwargs)
        assert self.made["attn_mask_type"] == "padding_causal" and self.made["qkv_format"] == "thd"

    def __call__(self, *args, **kwargs):
        """The definition: every document alone, every head, with explicit scores."""
        given = _bind("DotProductAttention.forward", *args, **kwargs)
        query, key, value = given["query_layer"], given["key_layer"], given["value_layer"]
        groups = self.made["num_attention_heads"] // self.made["num_gqa_groups"]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        left, right = given["window_size"]
        bounds = given["cu_seqlens_q"].tolist()
        assert given["cu_seqlens_kv"].tolist() == bounds and right == 0
        assert max(b - a for a, b in itertools.pairwise(bounds)) <= given["max_seqlen_q"]
        outputs = []
        for start, end in itertools.pairwise(bounds):
            q, k, v = (x[start:end].transpose(0, 1) for x in (query, key, value))
            scores = q @ k.transpose(1, 2) * self.made["softmax_scale"]
            if self.made["softcap"]:
                scores = self.made["softcap"] * torch.tanh(scores / self.made["softcap"])
            distance = torch.arange(end - start)[:, None] - torch.arange(end - start)[None]
            visible = (distance >= 0) & ((distance <= left) if left >= 0 else True)
            outputs.append((scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v).transpose(0, 1))
        return torch.cat(outputs).flatten(1)


class autocast:
    current = None

    def __init__(self, *args, **kwargs):
        self.given = _bind("autocast.__init__", *args, **kwargs)

    def __enter__(self):
        autocast.current = type(self.given["recipe"]).__name__ if self.given["enabled"] else None

    def __exit__(self, *args):
        autocast.current = None


@pytest.fixture
def stand_in(monkeypatch):
    names = SIGNATURES["transformer_engine"]["recipes"]
    recipes = types.SimpleNamespace(**{name: type(name, (), {}) for name in names})
    classes = (Linear, RMSNorm, DotProductAttention, autocast)
    package = types.SimpleNamespace(**{kind.__name__: kind for kind in classes})
    monkeypatch.setitem(sys.modules, "transformer_engine", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.common", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "transformer_engine.common.recipe", recipes)
    monkeypatch.setattr(adapter, "require_transformer_engine", lambda: None)
    adapter._core.cache_clear()
    yield
    adapter._core.cache_clear()


def _part(family: str, engine: TransformerEngineConfig | None):
    config = ModelConfig(config=tiny.tiny_fields(family), transformer_engine=engine)
    part = build_part(config)
    load_weights(part, config, device="cpu", seed=5)
    return part


def _logprobs_and_gradients(part):
    batch = tiny.packed_batch([[tiny.token_row(9, 1), tiny.token_row(23, 2)]])
    logprobs_BT = part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT
    logprobs_BT.sum().backward()
    return logprobs_BT.detach(), tiny.gradients(part)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2", "gemma2", "deepseek_v3"])
def test_swapped_layers_keep_names_weights_and_numbers(stand_in, family):
    want_logprobs, want = _logprobs_and_gradients(_part(family, None))
    part = _part(family, LAYERS_ONLY)
    kinds = {type(module) for module in part.modules()}
    assert Linear in kinds and RMSNorm in kinds
    assert not any("RMSNorm" in kind.__name__ and kind is not RMSNorm for kind in kinds)
    logprobs, got = _logprobs_and_gradients(part)
    assert list(got) == list(want)
    assert (logprobs - want_logprobs).abs().max() < 1e-5
    assert tiny.gradient_error(want, got) < 1e-5


def test_the_head_stays_torchs_and_tied(stand_in):
    part = _part("gemma3_text", LAYERS_ONLY)
    assert type(part.model.lm_head) is nn.Linear
    assert part.model.lm_head.weight is part.model.model.embed_tokens.weight


ATTENTION = {
    "grouped heads": {},
    "window": {"sliding_window": 4},
    "soft cap": {"softcap": 5.0},
    "scale": {"scaling": 0.3},
    "value width": {"value_width": 24},
    "whole rows": {"bounds": None},
}


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_is_that_of_packed_documents(stand_in, case):
    options = dict(ATTENTION[case])
    generator = torch.Generator().manual_seed(0)
    widths = {"query": (4, 16), "key": (2, 16), "value": (2, options.pop("value_width", 16))}
    # float64, in which both are exact: the adapter refuses float32 alone, which the package has no kernel for
    query, key, value = (
        torch.randn(2, heads, 12, width, dtype=torch.float64, generator=generator, requires_grad=True)
        for heads, width in widths.values()
    )
    bounds = options.pop("bounds", [0, 5, 12, 15, 24])
    if bounds is not None:
        options |= {"cu_seq_lens_q": torch.tensor(bounds, dtype=torch.int32), "max_length_q": 9}
    module = nn.Identity()
    want, _ = packed_attention(module, query, key, value, None, **options)
    wanted = torch.autograd.grad(want.square().sum(), (query, key, value))
    got, _ = adapter.te_attention(module, query, key, value, None, **options)
    assert got.shape == want.shape and (got - want).abs().max() < 1e-6
    for a, b in zip(torch.autograd.grad(got.square().sum(), (query, key, value)), wanted, strict=True):
        assert (a - b).abs().max() < 1e-5


def test_the_registered_attention_is_the_adapters(stand_in):
    part = build_part(ModelConfig(config=tiny.tiny_fields("llama"), transformer_engine=TransformerEngineConfig()))
    assert part.model.config._attn_implementation == adapter.ATTENTION
    with raises(ConfigError, "not_supported_by_model", values=("bfloat16", "float16", "float32")):
        _logprobs_and_gradients(_part("llama", TransformerEngineConfig()))


REFUSED = {
    "0.1": {"dropout": 0.1},
    "sinks": {"s_aux": torch.zeros(4)},
    "mask": {"attention_mask": torch.zeros(1, 1, 8, 8)},
    "context parallelism": {"context": object()},
    "not causal": {"is_causal": False},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_attention_refuses_what_it_would_get_wrong(stand_in, reason):
    options = {"attention_mask": None, **REFUSED[reason]}
    query = torch.zeros(1, 4, 8, 16, dtype=torch.bfloat16)
    fix = "model.transformer_engine.attention=false"
    with raises(ConfigError, "not_supported_by_model", values=(reason,), fix=fix):
        adapter.te_attention(nn.Identity(), query, query, query, **options)


@pytest.mark.parametrize("recipe, name", adapter._RECIPES.items())
def test_fp8_is_entered_by_each_linear_layer(stand_in, recipe, name):
    part = _part("llama", TransformerEngineConfig(attention=False, norm=False, fp8_recipe=recipe))
    _logprobs_and_gradients(part)
    linears = [module for module in part.modules() if isinstance(module, Linear)]
    assert len(linears) == 7 * tiny.NUM_LAYERS
    assert all(module.recipes == [name] for module in linears)
    with raises(ConfigError, "not_divisible", keys=("transformer_engine.fp8_recipe",), values=(32, 9)):
        part(labels=(batch := tiny.packed_batch([[tiny.token_row(9)]])).labels_BT, **batch.model_inputs())


def test_layers_that_do_not_fit_are_named(stand_in):
    fields = tiny.tiny_fields("llama", intermediate_size=72)
    config = TransformerEngineConfig(attention=False, fp8_recipe="mxfp8")
    with raises(ConfigError, "not_divisible", values=("model.layers.0.mlp.gate_proj", 64, 72)):
        build_part(ModelConfig(config=fields, transformer_engine=config))

    class OddRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

        def forward(self, x):
            return x * self.weight

    with raises(ConfigError, "not_supported_by_model", values=("odd", "OddRMSNorm")):
        adapter._norm("odd", OddRMSNorm())


CONFIG_REFUSED = {
    "fp8 without linear": (lambda: TransformerEngineConfig(linear=False, fp8_recipe="current"), "no_effect"),
    "delayed": (lambda: TransformerEngineConfig(fp8_recipe="delayed"), "invalid_choice"),
    "nothing": (lambda: TransformerEngineConfig(attention=False, linear=False, norm=False), "no_effect"),
    "two attentions": (
        lambda: ModelConfig(pretrained="x", attn_implementation="sdpa", transformer_engine=TransformerEngineConfig()),
        "mutually_exclusive",
    ),
    "adapters": (
        lambda: ModelConfig(pretrained="x", lora=LoRAConfig(), transformer_engine=TransformerEngineConfig()),
        "unsupported_combination",
    ),
}


@pytest.mark.parametrize("case", CONFIG_REFUSED)
def test_nodes_refuse_what_cannot_act(case):
    make, code = CONFIG_REFUSED[case]
    with raises(ConfigError, code) as caught:
        make()
    assert caught.value.fix.startswith("model.")


def test_without_the_package_or_cuda_nothing_is_built(monkeypatch):
    config = ModelConfig(config=tiny.tiny_fields("llama"), transformer_engine=TransformerEngineConfig())
    monkeypatch.setattr("automodel_cli.config.value_checks.find_spec", lambda name: None)
    with raises(ConfigError, "missing_package", fix="pip install --no-build-isolation automodel-cli[te]"):
        build_part(config)
    monkeypatch.setattr("automodel_cli.config.value_checks.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raises(ConfigError, "hardware_required", keys=("transformer_engine",)):
        build_part(config)
