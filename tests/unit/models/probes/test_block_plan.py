"""Tensor-parallel plans of models that publish none."""

from __future__ import annotations

import pytest
from transformers import Qwen3Config, Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextAttention, Qwen3VLTextModel

from automodel_cli.models.probes.block_plan import block_plan


def test_the_plan_of_qwen3_vl_is_that_of_qwen3():
    published = Qwen3Config.base_model_tp_plan
    assert block_plan(Qwen3VLTextModel, Qwen3VLTextConfig()) == published


def test_a_block_that_mixes_heads_has_no_plan(monkeypatch: pytest.MonkeyPatch):
    real = Qwen3VLTextAttention.forward

    def mixing(self, hidden_states, *args, **kwargs):
        output, weights = real(self, hidden_states, *args, **kwargs)
        return output.square(), weights

    monkeypatch.setattr(Qwen3VLTextAttention, "forward", mixing)
    assert block_plan(Qwen3VLTextModel, Qwen3VLTextConfig()) == {}
