"""The configs that ship, against the parameter counts that the models' authors publish."""

from __future__ import annotations

import pytest
import yaml

from automodel_cli.config.composition import bundled_recipes
from automodel_cli.models.builder import build_part
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub import bundled_configs
from automodel_cli.models.hub.source import hf_config
from automodel_cli.models.vision.config import VisionConfig

PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,  # the model card's safetensors count
    "Qwen/Qwen3-0.6B": 596_049_920,  # without the tied head; 0.44B without embeddings
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
    "Qwen/Qwen3-VL-8B-Instruct": 8_767_123_696,
    "google/gemma-3-12b-it": 12_187_325_040,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "moonshotai/Moonlight-16B-A3B-Instruct": 15_960_111_936,
    "openai/gpt-oss-20b": 20_914_757_184,
}


def test_every_hub_model_of_a_bundled_recipe_has_its_config_here() -> None:
    named = set()
    for path in bundled_recipes.conf_dir().rglob("*.yaml"):
        content = yaml.safe_load(path.read_text()) or {}
        for section in (content, content.get("model") or {}):
            name = section.get("pretrained") if isinstance(section, dict) else None
            if isinstance(name, str) and not name.startswith("runs/"):  # the export of an earlier run
                named.add(name)
    assert named <= set(PUBLISHED)
    folder = bundled_configs.bundled_config_path("any").parent
    assert set(PUBLISHED) == {path.stem.replace("--", "/") for path in folder.glob("*.json")}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_a_shipped_config_has_the_published_number_of_parameters(name: str) -> None:
    with bundled_configs.preferred():
        reads_pictures = "-VL-" in name or "gemma-3" in name
        part = build_part(ModelConfig(pretrained=name, vision=VisionConfig() if reads_pictures else None))
    number = sum(p.numel() for p in {id(p): p for p in part.parameters()}.values())
    assert number == pytest.approx(PUBLISHED[name], rel=1e-4)


def test_a_run_never_takes_a_shipped_config(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bundled_configs.fields("Qwen/Qwen3-0.6B", None) is None
    with bundled_configs.preferred():
        assert bundled_configs.fields("Qwen/Qwen3-0.6B", None) is not None
        assert bundled_configs.fields("Qwen/Qwen3-0.6B", "a-branch") is None
        assert hf_config(ModelConfig(pretrained="Qwen/Qwen3-0.6B")).hidden_size == 1024
