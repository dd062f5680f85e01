"""Processors of pictures: how they are loaded and called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma4Config, Gemma4ImageProcessorPil, LlavaProcessor
from transformers.utils import is_torchvision_available

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.vision.config import VisionConfig
from automodel_cli.models.vision.nodes import IMAGE, START, STOP, WordTokenizer
from automodel_cli.models.vision.probe import probe_pictures
from automodel_cli.models.vision.processor import FamilyProcessor, load_processor
from automodel_cli.models.vision.processor_compat import name_special_tokens
from tests.errors import raises
from tests.vision import TEXT, WORDS, config_of, noise, processor_of

VIDEO = "<|video_pad|>"


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


def gemma4(folder: Path) -> FamilyProcessor:
    """The processor of a Gemma 4 repository, loaded without torchvision."""
    tokenizer = WordTokenizer(WORDS).build()
    marks = {"boi_token": START, "eoi_token": STOP, "image_token": IMAGE, "boa_token": VIDEO, "eoa_token": VIDEO}
    name_special_tokens(tokenizer, marks | {"audio_token": VIDEO})
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Gemma4Processor"}))
    Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2).save_pretrained(folder)
    processor = load_processor(ModelConfig(pretrained=str(folder), vision=VisionConfig()), tokenizer)
    return FamilyProcessor(processor, gemma4_config())


def gemma4_config() -> Any:
    text = TEXT | {"hidden_size_per_layer_input": 0, "sliding_window": 8, "use_bidirectional_attention": "vision"}
    text |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    vision |= {"num_key_value_heads": 4, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2}
    return Gemma4Config(text_config=text, vision_config=vision, image_token_id=2, boi_token_id=3, eoi_token_id=4)


@pytest.mark.skipif(is_torchvision_available(), reason="AutoProcessor then makes the parts for video")
def test_gemma4_trains_on_pictures_without_torchvision(tmp_path: Path):
    processor = gemma4(tmp_path)
    ids = processor.replacement(30, 40).tolist()
    assert ids[0] == 3 and ids[-1] == 4 and set(ids[1:-1]) == {2}
    probe_pictures(gemma4_config(), processor)


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed")
def test_a_processor_that_needs_torchvision_is_refused_with_the_package(tmp_path: Path):
    processor_of("llava").tokenizer.save_pretrained(tmp_path)
    (tmp_path / "processor_config.json").write_text(json.dumps({"processor_class": "PixtralProcessor"}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "PixtralImageProcessor"}))
    config = ModelConfig(pretrained=str(tmp_path), vision=VisionConfig())
    with raises(ConfigError, "missing_package", keys=("model.vision.processor",), fix="pip install torchvision"):
        load_processor(config, processor_of("llava").tokenizer)
