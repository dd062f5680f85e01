"""Which modules of a part are its layers."""

from __future__ import annotations

from automodel_cli.distributed.layer_wrapping import transformer_layers
from automodel_cli.models.builder import build_part
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.pipelining.cut.cut_stage import cut_stage
from automodel_cli.pipelining.cut.split_check import check_split
from tests.tiny import tiny_fields


def test_a_stage_of_an_adapted_head_alone_has_no_layers():
    fields = tiny_fields("llama", num_hidden_layers=2, tie_word_embeddings=False)
    part = build_part(ModelConfig(config=fields, lora=LoRAConfig(rank=2, target_modules=["lm_head"])))
    stage = cut_stage(part, check_split(part.model), layers=range(2, 2), is_first=False, is_last=True)
    assert any("lora_A" in name for name, _ in stage.named_parameters())
    assert transformer_layers(stage) == []
