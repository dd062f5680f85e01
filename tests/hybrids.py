"""Tiny random models of the families whose layers packed attention does not reach, shared by the tests: those that
carry a state from token to token, and those whose attention reads more than documents."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from automodel_cli.models import transformers_compat
from automodel_cli.models.builder import part_of, train_every_token
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.document_masking import document_bounds
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.probes.tiny_model import build_small, shrink
from tests.marks import slow
from tests.tiny import gradient_error, gradients, packed_batch, separate_documents, token_row

LFM2 = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}
# What a family's default config leaves out of its layers
HYBRIDS: dict[str, dict] = {
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "kimi_linear": {},
    "olmo_hybrid": {},
    "minimax": {},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"num_hidden_layers": 4, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"num_hidden_layers": 4, "layer_types": ["mamba", "attention"] * 2},
    "nemotron_h": {},
    "falcon_mamba": {},
    "mamba": {},
    "mamba2": {},
    "zamba": {},
    "zamba2": {},
    "falcon_h1": {},
    "lfm2": LFM2,
    "lfm2_moe": LFM2,
    "lfm3": {},
    "bailing_hybrid": {},
    "recurrent_gemma": {},
    "rwkv": {},
}
HYBRIDS = {family: fields for family, fields in HYBRIDS.items() if family in CONFIG_MAPPING}  # of this transformers
# Their layers carry their state as those of another family do, which stands for them in the default run.
_ALIKE = (
    *("qwen3_5_text", "qwen3_5_moe_text"),  # Qwen3-Next
    *("jamba", "mamba", "zamba"),  # Falcon-Mamba
    *("bamba", "granitemoehybrid", "mamba2"),  # Nemotron-H, Zamba2
    "lfm2_moe",  # LFM2
)
EVERY_HYBRID = [*(family for family in HYBRIDS if family not in _ALIKE), *slow(*(f for f in _ALIKE if f in HYBRIDS))]
SHARED_INDEXERS = {
    "num_hidden_layers": 4,
    "indexer_types": ["full", "shared"] * 2,
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
}
# Sparse attention with an indexer, compressed attention
SPARSE: dict[str, dict] = {
    "deepseek_v32": {},
    "glm_moe_dsa": SHARED_INDEXERS,
    "axk2": {},
    "minimax_m3_vl_text": {"num_hidden_layers": 4, "layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "dots3_note_text": {},
    "deepseek_v4": {},
    "hy_v4": {},
    "qwen4_exp_text": {
        "indexer_n_heads": 8,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
    },
}
# Masks, biases and dropout of the library's own attention
OWN_ATTENTION: dict[str, dict] = {
    "llama4_text": {},
    "bloom": {},
    "falcon": {"alibi": True},
    "roformer": {"is_decoder": True},
}
SPARSE = {family: fields for family, fields in SPARSE.items() if family in CONFIG_MAPPING}


def hybrid(family: str) -> tuple[PretrainedConfig, PreTrainedModel]:
    """A tiny config, and the library's own model of it on eager attention, in train mode."""
    small = shrink(CONFIG_MAPPING[family](**{**HYBRIDS, **SPARSE, **OWN_ATTENTION}[family]))
    model = build_small(copy.deepcopy(small), lambda config: transformers_compat.causal_lm(config, dtype=torch.float32))
    train_every_token(model)
    return small, model


ROWS = [[token_row(9), token_row(6, 1), token_row(14, 2)], [token_row(20, 3), token_row(9, 4)]]


def part_like(small: PretrainedConfig, model: PreTrainedModel, **choice) -> ModelPart:
    part = part_of(copy.deepcopy(small), ModelConfig(pretrained="-", **choice), device="cpu")
    part.model.load_state_dict(model.state_dict())
    return part


def run(part: ModelPart, rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs `[B, T]` and the gradients of their weighted sum."""
    batch = packed_batch(rows)
    logprobs_BT = part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT
    (logprobs_BT * weights_like(logprobs_BT)).sum().backward()
    found = gradients(part.model)
    part.zero_grad()
    return logprobs_BT.detach(), found


def alone(model: PreTrainedModel, rows: Sequence[Sequence[Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """The same by the unmodified model, one document at a time."""
    logprobs_BT = torch.cat(separate_documents(model, rows)).view(len(rows), -1)
    (logprobs_BT * weights_like(logprobs_BT)).sum().backward()
    found = gradients(model)
    model.zero_grad()
    return logprobs_BT.detach(), found


def check_that_mixed_documents_show(
    family: str, monkeypatch: pytest.MonkeyPatch, rows: Sequence[Sequence[Tensor]]
) -> None:
    """Sabotage: rows pass for documents, so that those of a row see each other; the comparison must notice."""
    small, model = hybrid(family)
    part = part_like(small, model)
    monkeypatch.setattr(document_bounds.DocumentBounds, "are_rows", True)
    want_logprobs, want = alone(model, rows)
    logprobs, got = run(part, rows)
    assert (logprobs - want_logprobs).abs().max() > 1e-3
    assert gradient_error(want, got) > 1e-3


def weights_like(like: Tensor) -> Tensor:
    return torch.rand(like.shape, generator=torch.Generator().manual_seed(5))
