"""Which models may share a prefix between documents: measured on a small copy."""

from __future__ import annotations

import pytest
from transformers import CONFIG_MAPPING

from automodel_cli.data.batch import SeenKeys
from automodel_cli.models.attention.packed import register_packed_attention
from automodel_cli.models.prefix_support import why_not_shared
from tests.hybrids import HYBRIDS
from tests.tiny import tiny_config


def test_attention_of_every_kind_shares_a_prefix():
    """Plain; windows and soft caps; windows, sinks and experts; latent attention; tables that depend on the length."""
    register_packed_attention()
    long = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    long["original_max_position_embeddings"] = 64
    phi = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    configs = [tiny_config(family) for family in ("llama", "gemma2", "gpt_oss", "deepseek_v3")]
    configs.append(CONFIG_MAPPING["phi3"](**phi, intermediate_size=96, pad_token_id=0, rope_parameters=long))
    assert [why_not_shared(config) for config in configs] == [""] * len(configs)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_next", "qwen3_next has layers that are run document by document (Qwen3NextGatedDeltaNet)"),
        ("bloom", "the attention of bloom is the library's own, run document by document"),
    ],
)
def test_layers_that_read_tokens_in_order_share_none(family: str, reason: str):
    assert why_not_shared(CONFIG_MAPPING[family](**HYBRIDS.get(family, {}))) == reason


def test_the_measurement_sees_a_prefix_that_is_another(monkeypatch: pytest.MonkeyPatch):
    whole = SeenKeys.of
    late = staticmethod(lambda bounds, runs: whole(bounds, [(a + (n > 0), max(0, n - 1)) for a, n in runs]))
    monkeypatch.setattr(SeenKeys, "of", late)
    assert "layer 0 (LlamaDecoderLayer) of llama gives them something else" in why_not_shared(tiny_config("llama"))
