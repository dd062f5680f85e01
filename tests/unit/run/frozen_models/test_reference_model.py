"""When a rollout's only update may score its own tokens, and how many sequences a sampler decodes by itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from automodel_cli.rollout.engines.sampler import capacity
from automodel_cli.run.frozen_models.reference_model import draws_while_training
from tests import tiny


@pytest.mark.parametrize(
    ("family", "fields", "draws"),
    [
        ("llama", {}, False),
        ("llama", {"attention_dropout": 0.1}, True),
        ("mixtral", {"router_jitter_noise": 0.01}, True),
    ],
)
def test_dropout_and_jitter_are_noticed(family, fields, draws):
    model = tiny.build_hf(family)
    for name, value in fields.items():
        setattr(model.config, name, value)
    part = nn.Module()
    part.model = model
    assert draws_while_training(SimpleNamespace(parts=[part])) is draws
    model.lm_head.add_module("adapter", nn.Dropout(0.05))  # as an adapter brings it, whatever the config says
    assert draws_while_training(SimpleNamespace(parts=[part]))


CONFIG = {
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
}


@pytest.mark.parametrize(
    ("memory", "seq_len", "pp", "expected"),
    [
        # a slot: seq_len x 8 / pp layers x 2 x 2 heads x 64 x 4 bytes, and 1000 x 32 bytes of logits
        (8 * 100 * (512 * 8 * 1024 + 32_000), 512, 1, 100),
        (8 * 100 * (512 * 8 * 1024 + 32_000) - 1, 512, 1, 99),
        (8 * 100 * (512 * 4 * 1024 + 32_000), 512, 2, 100),
        (2**40, 512, 1, 256),
        (2**20, 512, 1, 1),
    ],
)
def test_slots_are_as_many_as_have_room(monkeypatch, memory, seq_len, pp, expected):
    monkeypatch.setattr(capacity, "_memory", lambda device: memory)
    monkeypatch.setattr(capacity.dist, "all_reduce", lambda tensor, op: None)  # one rank
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**CONFIG))
    mesh = SimpleNamespace(layout=SimpleNamespace(pp=pp), device=torch.device("cpu"))
    assert capacity.max_num_seqs(config, seq_len, mesh) == expected


def test_latent_attention_caches_what_its_heads_read():
    latent = SimpleNamespace(
        num_attention_heads=4, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24
    )
    assert capacity.cached_numbers(latent) == 4 * (16 + 8 + 24)
