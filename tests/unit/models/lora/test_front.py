"""Adapters of a composite: the layers that `peft` wraps on it, limited to the parts that are trained."""

from __future__ import annotations

from typing import Any

import peft
import pytest
from torch import nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.freezing import freeze_by_vision
from automodel_cli.models.lora import adapters as lora
from automodel_cli.models.lora.front import inject
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.vision.config import VisionConfig
from automodel_cli.models.vision.probe import small_part
from tests.errors import raises
from tests.vision import model_of

ALL = VisionConfig(tower="adapters", projector="adapters")


def adapted(kind: str, vision: VisionConfig, config: LoRAConfig) -> ModelPart:
    part = small_part(model_of(kind))
    freeze_by_vision(part, vision)
    inject(part, config, vision)
    return part


def names_of(part: ModelPart) -> set[str]:
    """The wrapped layers, by the names of the composite."""
    front, model = part.front, part.model
    assert front is not None
    base = next(name for name, module in model.named_modules() if module is model.base_model)
    of_text = {f"{front.text_name}.{name.removeprefix(f'{base}.')}" for name, _ in lora.wrappers(model)}
    return of_text | {name for name, _ in lora.wrappers(front.composite)}


def names_of_peft(kind: str, targets: str | list[str], **options: Any) -> set[str]:
    whole = model_of(kind)
    peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=targets, **options), whole)
    return {name for name, _ in lora.wrappers(whole)}


@pytest.mark.parametrize("kind", ["qwen3_vl", "llava"])
@pytest.mark.parametrize("targets", ["all-linear", r".*\.(qkv|linear_1|linear_fc1|v_proj)"])
def test_peft_wraps_the_same_layers_of_the_composite(kind: str, targets: str):
    part = adapted(kind, ALL, LoRAConfig(rank=4, target_modules=targets))
    assert names_of(part) == names_of_peft(kind, targets)
    trained = {name for name, param in part.named_parameters() if param.requires_grad}
    assert trained and all(".lora_" in name for name in trained)


def test_peft_selects_the_same_layers_of_the_composite():
    """Complete names of modules would adapt all layers, because `peft` does not compare them with the other lists."""
    targets, options = ["q_proj", "v_proj"], {"layers_to_transform": [1], "exclude_modules": ["v_proj"]}
    vision = VisionConfig(tower="adapters", projector="frozen")
    part = adapted("llava", vision, LoRAConfig(rank=4, target_modules=targets, **options))
    assert names_of(part) == names_of_peft("llava", targets, **options)


def test_a_frozen_tower_keeps_layers_with_the_names_of_the_text_model():
    every = names_of_peft("llava", ["q_proj", "v_proj"])
    config = LoRAConfig(rank=4, target_modules=["q_proj", "v_proj"])
    for vision, word in (
        (VisionConfig(tower="frozen", projector="frozen"), "language_model"),
        (VisionConfig(tower="adapters", projector="frozen", text="frozen"), "vision_tower"),
    ):
        assert names_of(adapted("llava", vision, config)) == {name for name in every if f".{word}." in name}


def test_a_part_is_trained_by_whole_modules_instead():
    config = LoRAConfig(rank=4, target_modules=["q_proj"], modules_to_save=["multi_modal_projector"])
    part = adapted("llava", VisionConfig(tower="frozen", projector="adapters"), config)
    assert part.front is not None
    projector = part.front.composite.get_submodule("model.multi_modal_projector")
    assert {id(p) for p in part.front.parameters() if p.requires_grad} == {id(p) for p in projector.parameters()}
    assert isinstance(part.front.composite.lm_head, nn.Identity), "the composite is cut again"


@pytest.mark.parametrize(
    ("kind", "targets", "code", "key"),
    [
        ("llava", ["q_proj"], "nothing_to_train", "model.vision.projector"),
        ("gemma3", "all-linear", "nothing_to_train", "model.vision.projector"),  # its matrix is no layer
        ("qwen3_vl", ["q_proj", "qvk"], "unknown_name", "model.lora.target_modules"),
        ("qwen3_vl", ".*nothing", "unknown_name", "lora.target_modules"),
    ],
)
def test_targets_that_match_nothing_are_refused(kind: str, targets: str | list[str], code: str, key: str):
    with raises(ConfigError, code, keys=(key,)):
        adapted(kind, ALL, LoRAConfig(rank=4, target_modules=targets))
