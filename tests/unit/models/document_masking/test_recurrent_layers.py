"""Layers that carry a state from token to token: packed rows equal separate documents, on loss and every gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from automodel_cli.distributed.activation_checkpointing.apply import apply_activation_checkpointing
from automodel_cli.models.builder import part_of
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.document_masking import document_bounds, recurrent_layers
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.packing_support import probe_context, probe_packing
from automodel_cli.models.probes import token_mixing
from tests.hybrids import (
    EVERY_HYBRID,
    HYBRIDS,
    ROWS,
    alone,
    check_that_mixed_documents_show,
    hybrid,
    part_like,
    run,
    weights_like,
)
from tests.rounding import tolerance
from tests.tiny import FAMILIES, gradient_error, gradients, packed_batch, tiny_config, token_row

pytestmark = pytest.mark.slow

OF_STATES = 3.0
"""Recurrences add every token to one state: their rounding is up to three times that of attention. A leak is 1e-3 and
more."""


@pytest.mark.parametrize("family", EVERY_HYBRID)
def test_packed_equals_separate_documents(family: str):
    small, model = hybrid(family)
    part = part_like(small, model)
    want_logprobs, want = alone(model, ROWS)
    logprobs, got = run(part, ROWS)
    off, gradients_off = (logprobs - want_logprobs).abs().max().item(), gradient_error(want, got)
    print(f"{family}: log-probs off by {off:.1e}, gradients by {gradients_off:.1e}")
    assert off < OF_STATES * tolerance()
    assert gradients_off < OF_STATES * tolerance()


def test_a_state_of_as_many_heads_as_a_document_has_tokens_is_no_result_per_token():
    """MiniMax returns its state `[G, H, D, D]` beside its tokens `[G, S, D]`."""
    small, model = hybrid("minimax")
    rows = [[token_row(small.num_attention_heads), token_row(25, 1)]]
    want_logprobs, want = alone(model, rows)
    logprobs, got = run(part_like(small, model), rows)
    assert (logprobs - want_logprobs).abs().max() < OF_STATES * tolerance()
    assert gradient_error(want, got) < OF_STATES * tolerance()


@pytest.mark.parametrize("family", ["qwen3_next", "mamba", "lfm2", "falcon_h1"])
def test_the_comparison_sees_a_state_that_leaks(family: str, monkeypatch: pytest.MonkeyPatch):
    check_that_mixed_documents_show(family, monkeypatch, ROWS)


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_mamba"])
def test_recomputation_meets_its_own_documents_with_two_microbatches_in_flight(family: str):
    """Falcon-Mamba drops every keyword on the way to its layers."""
    small, model = hybrid(family)
    part = part_like(small, model)
    one, other = ROWS, [[token_row(5, 7), token_row(24, 8)]]
    want = [run(part, rows)[1] for rows in (one, other)]
    layers = next(m for m in part.model.modules() if isinstance(m, torch.nn.ModuleList))
    apply_activation_checkpointing(list(layers), "full")
    batches = [packed_batch(rows) for rows in (one, other)]
    logprobs = [part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT for batch in batches]
    for of_batch, expected in zip(logprobs, want, strict=True):
        (of_batch * weights_like(of_batch)).sum().backward()
        assert gradient_error(expected, gradients(part.model)) < OF_STATES * tolerance()
        part.zero_grad()


def test_rows_of_one_document_run_as_they_are(monkeypatch: pytest.MonkeyPatch):
    """One call for all rows; and the library's torch code, which refuses boundaries, is not shown any."""
    small, model = hybrid("qwen3_5_text")
    part = part_like(small, model)
    rows = [[token_row(12)], [token_row(12, 1)]]
    want_logprobs, want = alone(model, rows)
    seen = []
    layer = next(m for m in part.model.modules() if isinstance(m, recurrent_layers.StateLayer))
    layer.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    monkeypatch.setattr(document_bounds.segments, "document_groups", None)
    logprobs, got = run(part, rows)
    assert len(seen) == 1
    assert (logprobs - want_logprobs).abs().max() < OF_STATES * tolerance()
    assert gradient_error(want, got) < OF_STATES * tolerance()


def test_adapters_inside_a_state_layer_train_on_packed_rows():
    small, _ = hybrid("qwen3_next")
    part = part_of(copy.deepcopy(small), ModelConfig(pretrained="-", lora=LoRAConfig(rank=4)), device="cpu")
    for name, param in part.named_parameters():
        torch.manual_seed(len(name))
        torch.nn.init.normal_(param, std=0.1)
    _, together = run(part, ROWS)
    apart: dict[str, Tensor] = {}
    weights = weights_like(torch.empty(2, 29))
    for row, row_weights in zip(ROWS, weights, strict=True):
        for document, its_weights in zip(row, row_weights.split([len(d) for d in row]), strict=True):
            batch = packed_batch([[document]])
            (part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT * its_weights).sum().backward()
    apart = gradients(part.model)
    assert any("linear_attn" in name for name in together)
    # Adapters of rank 4 add up rounding that whole weights spread.
    assert gradient_error(apart, together) < 3 * OF_STATES * tolerance()


@pytest.mark.parametrize("family", FAMILIES)
def test_models_without_a_state_are_left_as_they_are(family: str):
    assert not token_mixing.state_layer_classes(tiny_config(family))


def test_attention_that_does_not_hear_of_documents_is_run_per_document_too():
    """StableLM drops the boundaries before its attention: what is measured is what mixes, not what it is called."""
    assert [name.rpartition(".")[2] for name in token_mixing.state_layer_classes(CONFIG_MAPPING["stablelm"]())] == [
        "StableLmAttention"
    ]
    probe_packing(CONFIG_MAPPING["stablelm"]())


@pytest.mark.parametrize("family", EVERY_HYBRID)
def test_the_probes_allow_packed_and_shared_rows(family: str):
    config = CONFIG_MAPPING[family](**HYBRIDS[family])
    probe_packing(config)
    probe_context(config)
