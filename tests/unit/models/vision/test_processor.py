"""Processors of pictures: how they are loaded and called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlavaProcessor
from transformers.utils import is_torchvision_available

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.vision.config import VisionConfig
from automodel_cli.models.vision.processor import FamilyProcessor, load_processor
from tests.errors import raises
from tests.vision import config_of, noise, processor_of


class OtherSize(LlavaProcessor):
    """Passes keywords to its image processor, as that of Pixtral does with the size of merged patches."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        side = {"height": 8, "width": 8}
        return super().__call__(*args, **kwargs, images_kwargs={"size": side, "crop_size": side})


def test_training_passes_the_keywords_of_the_processor_to_its_image_processor():
    processor = processor_of("llava")
    processor.__class__ = OtherSize
    found = FamilyProcessor(processor, config_of("llava"))
    assert type(processor.image_processor).__name__ == "CLIPImageProcessorPil"
    assert found.inputs([noise(20, 30)])["pixel_values"].shape == (1, 3, 8, 8)
    assert found.replacement(20, 30).tolist() == [2] * (8 // 4) ** 2


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed")
def test_a_processor_that_needs_torchvision_is_refused_with_the_package(tmp_path: Path):
    processor_of("llava").tokenizer.save_pretrained(tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "PixtralProcessor"}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "PixtralImageProcessor"}))
    config = ModelConfig(pretrained=str(tmp_path), vision=VisionConfig())
    with raises(ConfigError, "missing_package", keys=("model.vision.processor",), fix="pip install torchvision"):
        load_processor(config, processor_of("llava").tokenizer)
