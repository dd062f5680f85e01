"""Packed rows must equal separate documents, on loss and every gradient, for every family; what cannot is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.attention import packed as attention_packed
from automodel_cli.models.builder import train_every_token
from automodel_cli.models.lm_head.detection import detect_head
from automodel_cli.models.lm_head.head import HeadKind
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.packing_support import probe_packing
from tests.errors import raises
from tests.rounding import tolerance
from tests.tiny import (
    FAMILIES,
    WINDOW,
    build_hf,
    gradient_error,
    gradients,
    packed_batch,
    separate_documents,
    tiny_config,
    token_row,
)

ROWS = [[token_row(9), token_row(6, 1), token_row(14, 2)], [token_row(20, 3), token_row(9, 4)]]


def _reference(model: PreTrainedModel, weights: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    train_every_token(model)
    logprobs = torch.cat(separate_documents(model, ROWS)).view(weights.shape)
    (logprobs * weights).sum().backward()
    found = gradients(model)
    model.zero_grad()
    return logprobs.detach(), found


@pytest.fixture(autouse=True)
def _registered():
    attention_packed.register_packed_attention()


@pytest.mark.parametrize("path", ["fused", "generic"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_separate_documents(family: str, path: str):
    model = build_hf(family)
    batch = packed_batch(ROWS)
    weights = torch.rand(batch.shape, generator=torch.Generator().manual_seed(5))
    want_logprobs, want = _reference(model, weights)
    model.set_attn_implementation("packed")
    kind = detect_head(tiny_config(family)) if path == "fused" else HeadKind("generic")
    assert path == "generic" or kind.name != "generic"
    logprobs = ModelPart(model, kind, chunk_size=11)(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT
    (logprobs * weights).sum().backward()
    assert (logprobs - want_logprobs).abs().max() < 2e-6
    assert gradient_error(want, gradients(model)) < tolerance()


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_the_comparison_sees_a_dropped_document_boundary(family: str):
    model = build_hf(family)
    batch = packed_batch(ROWS)
    want_logprobs, want = _reference(model, torch.ones(batch.shape))
    model.set_attn_implementation("packed")
    inputs = {**batch.model_inputs(), "cu_seq_lens_q": None}
    logprobs = ModelPart(model, HeadKind("plain"))(labels=batch.labels_BT, **inputs).logprobs_BT
    logprobs.sum().backward()
    assert (logprobs - want_logprobs).abs().max() > 1e-3
    assert gradient_error(want, gradients(model)) > 1e-3


@pytest.mark.parametrize("softcap", [None, 20.0])
@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("value_width", [16, 24])
def test_sinks_windows_and_wide_values_against_the_definition(softcap, window, value_width):
    """Documents of 4 tokens with 4 heads: equal sizes must not confuse the kernel's log-sum-exp layout."""
    generator = torch.Generator().manual_seed(0)
    lengths = (4, 11, 25)
    total = sum(lengths)
    query = torch.randn(1, 4, total, 16, generator=generator)
    key, value = (
        torch.randn(1, 2, total, 16, generator=generator),
        torch.randn(1, 2, total, value_width, generator=generator),
    )
    sink = torch.randn(4, generator=generator)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, sink)]
    weights = torch.randn(1, total, 4, value_width, generator=generator)
    cu = torch.tensor([0, 4, 15, 40], dtype=torch.int32)
    out, _ = attention_packed.packed_attention(
        torch.nn.Module(), query, key, value, None, 0.25, 0.0, window, softcap, None if softcap else sink, cu
    )
    got = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=bool(softcap))
    parts = []
    for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True):
        position = torch.arange(q.shape[2])
        gap = position[:, None] - position[None]
        hidden = (gap < 0) | (gap >= (window or total))
        scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * 0.25
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(hidden, float("-inf"))
        if softcap is None:
            scores = torch.cat([scores, sink.view(1, 4, 1, 1).expand(1, 4, q.shape[2], 1)], -1)
        probs = scores.softmax(-1)[..., : q.shape[2]]
        parts.append((probs @ v.repeat_interleave(2, 1)).transpose(1, 2))
    expected = torch.cat(parts, 1)
    want = torch.autograd.grad((expected * weights).sum(), leaves, allow_unused=bool(softcap))
    assert torch.allclose(out, expected, atol=2e-6)
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.allclose(ours, theirs, atol=1e-5)


def test_what_packed_attention_cannot_compute_is_refused():
    q = torch.randn(1, 2, 4, 8)
    module = torch.nn.Module()
    with raises(ConfigError, "unsupported_combination", keys=("attn_implementation",), values=(0.1,)):
        attention_packed.packed_attention(module, q, q, q, None, dropout=0.1)
    with raises(ConfigError, "not_supported", values=(1, 4)):
        attention_packed.packed_attention(module, q[:, :, :1], q, q, None)
    with raises(ConfigError, "not_supported_by_model", keys=("attn_implementation",), values=("mask",)):
        attention_packed.packed_attention(module, q, q, q, torch.zeros(1, 1, 4, 4))


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_generation_switches_to_the_librarys_attention_and_back(family: str):
    model = build_hf(family).eval()
    ids = token_row(7)[None]
    want = model.generate(ids, max_new_tokens=5, do_sample=False)
    model.set_attn_implementation("packed")
    with attention_packed.library_attention(model):
        got = model.generate(ids, max_new_tokens=5, do_sample=False)
    assert got.tolist() == want.tolist()
    assert model.config._attn_implementation == "packed"


@pytest.mark.parametrize("family", FAMILIES)
def test_probe_accepts(family: str):
    probe_packing(tiny_config(family))


def test_probe_leaves_the_config_alone():
    config = tiny_config("gpt_oss")
    before = config.to_dict()
    probe_packing(config)
    assert config.to_dict() == before


@pytest.mark.parametrize(
    ("family", "code", "values"),
    [
        ("gpt_neox_japanese", "not_supported_by_model", ("layer 0", "GPTNeoXJapaneseLayer")),
        ("reformer", "not_measured", ("reformer",)),
    ],
)
def test_probe_refuses_and_names_the_layer(family: str, code: str, values: tuple[str, ...]):
    with raises(ConfigError, code, keys=("data.packing",), values=values):
        probe_packing(CONFIG_MAPPING[family]())


def test_probe_refuses_the_librarys_leak_and_offers_what_works():
    with raises(ConfigError, "not_supported_by_model", keys=("data.packing",), values=("gpt_oss", "eager")):
        probe_packing(tiny_config("gpt_oss"), attention="eager")
    # Its biases by position are of the whole row.
    with raises(ConfigError, "not_supported_by_model", keys=("data.packing",)) as refusal:
        probe_packing(CONFIG_MAPPING["bloom"](), attention="eager")
    assert refusal.value.fix
