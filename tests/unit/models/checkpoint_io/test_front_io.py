"""The front end is read from a repository, and written back under the original names."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageTextToText

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.export import export_hf
from automodel_cli.models.checkpoint_io.front_io import fill_front
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.vision.config import VisionConfig
from automodel_cli.models.vision.front import TYPE_IDS
from automodel_cli.models.vision.probe import packed_rows
from automodel_cli.models.vision.processor import FamilyProcessor, load_processor, picture_processor
from tests.composites import tensors
from tests.errors import raises
from tests.vision import noise, processor_of, repository


def _loaded(folder: Path) -> tuple[ModelPart, ModelConfig]:
    config = ModelConfig(pretrained=str(folder), vision=VisionConfig())
    part = build_part(config)
    load_weights(part, config, device="cpu", seed=0)
    fill_front(part, config, buffer_device=torch.device("cpu"), seed=0)
    return part, config


def _logprobs(model: torch.nn.Module, processor: FamilyProcessor) -> torch.Tensor:
    """Of one document with a picture, by the part or by the composite."""
    run = torch.from_numpy(processor.replacement(16, 24).astype("int64"))
    ids_T = torch.cat([torch.arange(10, 15), run, torch.arange(15, 20)])
    image = noise(16, 24)
    if isinstance(model, ModelPart):
        batch = packed_rows([[(ids_T, [image])]], processor)
        found = model(**batch.head_inputs(), **batch.model_inputs()).logprobs_BT[0, : len(ids_T) - 1]
        return found[ids_T[1:] != processor.placeholder]
    given = {name: (ids_T[None] == processor.placeholder).long() for name in TYPE_IDS if name in processor.takes}
    logits_TV = model(input_ids=ids_T[None], **given, **processor.inputs([image]), use_cache=False).logits[0, :-1]
    found = logits_TV.log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0]
    return found[ids_T[1:] != processor.placeholder]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3_vl", "llava", "qwen3_vl_moe"])
def test_a_repository_is_read_trained_and_written_back(kind: str, tmp_path: Path):
    whole = repository(kind, tmp_path / "original")
    part, config = _loaded(tmp_path / "original")
    processor = FamilyProcessor(processor_of(kind), whole.config)
    assert (_logprobs(part.eval(), processor) - _logprobs(whole, processor)).abs().max() < 1e-5
    for param in part.parameters():
        param.mul_(1.1)
    export_hf([part], config, None, tmp_path / "export")
    before, after = tensors(tmp_path / "original"), tensors(tmp_path / "export")
    assert before.keys() == after.keys()
    reloaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "export", attn_implementation="sdpa").eval()
    assert (_logprobs(part, processor) - _logprobs(reloaded, processor)).abs().max() < 1e-5
    assert not torch.allclose(_logprobs(part, processor), _logprobs(whole, processor), atol=1e-3)


def test_a_repository_without_a_tensor_of_the_tower_is_refused(tmp_path: Path):
    repository("qwen3_vl", tmp_path)
    kept = {name: value for name, value in tensors(tmp_path).items() if "blocks.1.norm1" not in name}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with raises(ConfigError, "weights_mismatch"):
        _loaded(tmp_path)


def test_the_processor_of_a_folder_is_that_of_the_library(tmp_path: Path):
    repository("qwen3_vl", tmp_path)
    config = ModelConfig(pretrained=str(tmp_path), vision=VisionConfig())
    library = processor_of("qwen3_vl")
    loaded = picture_processor(config, library.tokenizer)
    image = noise(24, 40)
    want = library.image_processor(images=[image], return_tensors="pt")
    assert all(torch.equal(loaded.inputs([image])[name], want[name]) for name in ("pixel_values", "image_grid_thw"))
    assert (
        loaded.replacement(24, 40).tolist()
        == FamilyProcessor(load_processor(config, library.tokenizer), loaded._meta.config).replacement(24, 40).tolist()
    )


def test_random_weights_need_a_processor():
    config = ModelConfig(config={"model_type": "qwen3_vl"}, vision=VisionConfig())
    with raises(ConfigError, "missing_key", keys=("model.vision.processor",)):
        load_processor(config, None)


def test_recipes_with_pictures_need_pillow(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "PIL", None)  # as if it were not installed
    config = ModelConfig(config={"model_type": "qwen3_vl"}, vision=VisionConfig())
    with raises(ConfigError, "missing_package", keys=("model.vision",)):
        load_processor(config, None)
