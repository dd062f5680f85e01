"""Which layers must share a stage with the front end."""

from __future__ import annotations

import pytest
from transformers import Qwen3VLConfig

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.vision import shares
from automodel_cli.models.vision.processor import FamilyProcessor
from automodel_cli.pipelining.cut import picture_split
from automodel_cli.pipelining.cut.picture_split import layers_of_first_stage
from tests.errors import raises
from tests.vision import config_of, processor_of


def _needed(kind: str, config: Qwen3VLConfig | None = None) -> int:
    config = config or config_of(kind)
    return layers_of_first_stage(config, FamilyProcessor(processor_of(kind), config))


@pytest.mark.parametrize(("kind", "layers"), [("qwen3_vl", 2), ("llava", 0)])
def test_layers_that_add_features_are_counted(kind: str, layers: int):
    assert _needed(kind) == layers


def test_each_deepstack_level_of_a_deep_tower_is_a_layer():
    config = config_of("qwen3_vl")
    config.vision_config.depth = 27
    config.vision_config.deepstack_visual_indexes = [8, 16, 24]
    config.text_config.num_hidden_layers = 36
    config.text_config.layer_types = ["full_attention"] * 36
    assert _needed("qwen3_vl", config) == 3


def test_one_layer_fewer_is_noticed(monkeypatch: pytest.MonkeyPatch):
    real = shares.num_feature_layers
    monkeypatch.setattr(shares, "num_feature_layers", lambda *given: real(*given) - 1)
    monkeypatch.setattr(picture_split, "_measured", {})
    with raises(ConfigError, "not_supported_by_model", keys=("pp_size",)):
        _needed("qwen3_vl")
