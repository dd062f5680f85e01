"""Tiny random models of the families whose layers carry a state from token to token, shared by the tests."""

from __future__ import annotations

import copy

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedModel

from automodel_cli.models import compat
from automodel_cli.models.build import train_every_token
from automodel_cli.models.shrink import build_small, shrink

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


def hybrid(family: str) -> tuple[PretrainedConfig, PreTrainedModel]:
    """A tiny config, and the library's own model of it on eager attention, in train mode."""
    small = shrink(CONFIG_MAPPING[family](**HYBRIDS[family]))
    model = build_small(copy.deepcopy(small), lambda config: compat.causal_lm(config, dtype=torch.float32))
    train_every_token(model)
    return small, model
