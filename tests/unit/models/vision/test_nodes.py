"""Processors that are made in code: `AutoProcessor` finds all parts that it reads."""

from __future__ import annotations

import json
from pathlib import Path

import transformers

from automodel_cli.models.vision.nodes import QwenProcessor, WordTokenizer


def test_the_video_part_of_qwen_is_written_with_the_patches_of_its_pictures(tmp_path: Path) -> None:
    tokenizer = WordTokenizer(words=("red",)).build()
    processor = QwenProcessor(patch_size=8, merge_size=2, temporal_patch_size=2, min_pixels=256, max_pixels=4096)
    processor.build_processor(tokenizer).save_pretrained(tmp_path)
    video = json.loads((tmp_path / "video_preprocessor_config.json").read_text())
    pictures = json.loads((tmp_path / "processor_config.json").read_text())["image_processor"]
    source = Path(transformers.__file__).parent / "models" / "qwen3_vl" / "video_processing_qwen3_vl.py"
    assert f"class {video.pop('video_processor_type')}(" in source.read_text()
    assert video and all(pictures[key] == value for key, value in video.items())
