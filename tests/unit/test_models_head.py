"""The head: what it is, its log-probs, entropies and gradients against the plain definition, and what it skips."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.models import head as head_module
from automodel_cli.models.head import Head, HeadKind, classify, detect_head, fused_logprobs, head_logits
from tests.tiny import build_hf, logprobs_of, tiny_config

VOCAB, WIDTH = 50, 12
EXPECTED = {"llama": "plain", "gemma3_text": "plain", "gpt_oss": "plain", "gemma2": "softcap", "granite": "scale"}


@pytest.mark.parametrize("family", EXPECTED)
def test_detection_by_measurement(family: str):
    kind = detect_head(tiny_config(family))
    assert kind.name == EXPECTED[family]
    if family == "granite":
        assert kind.value == pytest.approx(1 / 4.0)
    if family == "gemma2":
        assert kind.value == 30.0


def test_a_scale_that_depends_on_the_width_is_measured_at_the_users_width():
    config = tiny_config("granite", hidden_size=128)
    assert detect_head(config).value == pytest.approx(0.25)


def test_something_else_is_generic():
    product = torch.randn(1, 8, 20)
    assert classify(product.abs(), product, None).name == "generic"
    assert classify(product + 0.1, product, None).name == "generic"
    assert classify(product * -3, product, None) == HeadKind("scale", pytest.approx(-3))
    assert classify(5 * torch.tanh(product / 5), product, 7.0).name == "generic"


def _final(product: torch.Tensor, kind: HeadKind) -> torch.Tensor:
    if kind.name == "scale":
        return product * kind.value
    return kind.value * torch.tanh(product / kind.value) if kind.name == "softcap" else product


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("kind", [HeadKind("plain"), HeadKind("scale", 0.3), HeadKind("softcap", 2.5)])
def test_fused_equals_the_definition(kind: HeadKind, uniform: bool):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, WIDTH, generator=generator, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, requires_grad=True)
    labels = torch.randint(0, VOCAB, (23,), generator=generator)
    incoming = torch.full((23,), -0.7) if uniform else torch.randn(23, generator=generator)
    logits = _final(hidden @ weight.t(), kind)
    expected = logprobs_of(logits, labels)
    want = torch.autograd.grad((expected * incoming).sum(), (hidden, weight))
    logprobs = fused_logprobs(hidden, weight, labels, kind, 5)
    got = torch.autograd.grad((logprobs * incoming).sum(), (hidden, weight))
    assert torch.allclose(logprobs, expected, atol=2e-6)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def test_a_frozen_weight_gets_no_gradient_and_bf16_stays_close():
    hidden = torch.randn(9, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, dtype=torch.bfloat16)
    labels = torch.randint(0, VOCAB, (9,))
    logprobs = fused_logprobs(hidden, weight, labels, HeadKind("plain"), 4)
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32 and weight.grad is None and hidden.grad is not None
    assert torch.allclose(logprobs, logprobs_of(hidden.float() @ weight.float().t(), labels), atol=0.1)


@pytest.mark.parametrize("kind", ["plain", "generic"])
def test_only_supervised_positions_are_computed(kind: str, monkeypatch: pytest.MonkeyPatch):
    model = build_hf("llama")
    seen = []
    for name in ("_logits", "head_logits"):
        real = getattr(head_module, name)

        def count(a, b, *rest, real=real, name=name):
            seen.append((a if name == "_logits" else b).flatten(0, -2).shape[0])
            return real(a, b, *rest)

        monkeypatch.setattr(head_module, name, count)
    labels = torch.full((2, 16), IGNORE_INDEX)
    labels[0, 3] = labels[1, 7] = labels[1, 8] = 5
    hidden = torch.randn(2, 16, 64, requires_grad=True)
    logprobs = Head(model, HeadKind(kind))(hidden, labels).logprobs_BT  # type: ignore[arg-type]
    assert sum(seen) == 3
    assert (logprobs != 0).nonzero().tolist() == [[0, 3], [1, 7], [1, 8]]
    logprobs.sum().backward()
    assert hidden.grad is not None and (hidden.grad.abs().sum(-1) > 0).sum() == 3


@pytest.mark.parametrize("kind", ["plain", "generic"])
def test_a_microbatch_without_labels_still_gives_every_parameter_a_gradient(kind: str):
    model = build_hf("llama")
    hidden = torch.randn(1, 4, 64, requires_grad=True)
    logprobs = Head(model, HeadKind(kind))(hidden, torch.full((1, 4), IGNORE_INDEX)).logprobs_BT  # type: ignore[arg-type]
    assert logprobs.tolist() == [[0.0] * 4]
    logprobs.sum().backward()
    assert hidden.grad is not None and not hidden.grad.any()
    assert model.lm_head.weight.grad is not None and not model.lm_head.weight.grad.any()


def test_a_head_with_a_bias_takes_the_generic_path():
    model = build_hf("llama")
    model.lm_head = nn.Linear(64, 160, bias=True)
    hidden, labels = torch.randn(1, 6, 64), torch.randint(0, 160, (1, 6))
    logprobs = Head(model, HeadKind("plain"), chunk_size=4)(hidden, labels).logprobs_BT
    assert torch.allclose(logprobs, logprobs_of(model.lm_head(hidden), labels), atol=2e-6)
    assert torch.equal(head_logits(model, hidden), model.lm_head(hidden))
