"""Attention that packed attention cannot compute, run document by document: packed rows equal separate documents, on
the log-probs and every gradient."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.activation_checkpointing.apply import apply_activation_checkpointing
from automodel_cli.models.attention.packed import PACKED
from automodel_cli.models.builder import part_of
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.document_masking import recurrent_layers
from automodel_cli.models.packing_support import probe_context, probe_packing
from automodel_cli.models.probes import isolation
from automodel_cli.models.probes.isolation import IsolationMethod, select_isolation
from tests.errors import raises
from tests.hybrids import (
    OWN_ATTENTION,
    ROWS,
    SPARSE,
    alone,
    check_that_mixed_documents_show,
    hybrid,
    part_like,
    run,
    weights_like,
)
from tests.rounding import tolerance
from tests.tiny import build_hf, gradient_error, gradients, packed_batch, tiny_config, token_row


@pytest.mark.slow
@pytest.mark.parametrize("family", [*SPARSE, *OWN_ATTENTION])
def test_packed_equals_separate_documents(family: str):
    small, model = hybrid(family)
    part = part_like(small, model)
    assert recurrent_layers.runs_by_document(part.model)
    want_logprobs, want = alone(model, ROWS)
    logprobs, got = run(part, ROWS)
    off, gradients_off = (logprobs - want_logprobs).abs().max().item(), gradient_error(want, got)
    print(f"{family}: log-probs off by {off:.1e}, gradients by {gradients_off:.1e}")
    assert off < tolerance()
    assert gradients_off < tolerance()


@pytest.mark.parametrize("family", ["deepseek_v32", "deepseek_v4", "bloom"])
def test_the_comparison_sees_attention_across_documents(family: str, monkeypatch: pytest.MonkeyPatch):
    check_that_mixed_documents_show(family, monkeypatch, ROWS)


def test_the_way_is_found_once_wherever_the_model_lies(tmp_path: Path):
    model = build_hf("granite")
    searches = []
    for folder in ("here", "there"):
        model.save_pretrained(tmp_path / folder)
        assert select_isolation(AutoConfig.from_pretrained(tmp_path / folder)) == IsolationMethod(PACKED)
        searches.append(isolation._first_exact.cache_info().misses)
    assert searches[0] == searches[1]


def test_layers_hand_each_other_what_an_indexer_chose_within_a_document():
    """Two microbatches in flight, recomputed; documents shorter than what is chosen among longer ones."""
    small, model = hybrid("glm_moe_dsa")
    part = part_like(small, model)
    batches = [[[token_row(3), token_row(20, 1)]], [[token_row(2, 7), token_row(2, 9), token_row(24, 8)]]]
    want = [alone(model, rows)[1] for rows in batches]
    layers = next(m for m in part.model.modules() if isinstance(m, torch.nn.ModuleList))
    apply_activation_checkpointing(list(layers), "full")
    packed = [packed_batch(rows) for rows in batches]
    logprobs = [part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT for batch in packed]
    for of_batch, expected in zip(logprobs, want, strict=True):
        (of_batch * weights_like(of_batch)).sum().backward()
        assert gradient_error(expected, gradients(part.model)) < tolerance()
        part.zero_grad()


def test_dropout_that_packed_attention_has_not_is_trained():
    config = CONFIG_MAPPING["gpt2"](n_layer=2, n_embd=64, n_head=4, vocab_size=160, attn_pdrop=0.4)
    assert select_isolation(config).by_document
    part = part_of(copy.deepcopy(config), ModelConfig(pretrained="-"), device="cpu")
    batch = packed_batch(ROWS)
    once, again = (part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT for _ in range(2))
    assert not torch.equal(once, again)


def test_what_packed_attention_computes_stays_with_it():
    assert select_isolation(tiny_config("llama")) == IsolationMethod(PACKED)
    way = select_isolation(CONFIG_MAPPING["qwen3_next"]())
    assert way.attention == PACKED and not way.by_document and way.classes


def test_the_probes_allow_packed_rows_and_refuse_shared_ones():
    config = CONFIG_MAPPING["deepseek_v32"]()
    probe_packing(config)
    with raises(ConfigError, "not_supported_by_model", keys=("mesh.cp_size",), values=("deepseek_v32",)):
        probe_context(config)
