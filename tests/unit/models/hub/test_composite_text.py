"""Text-only training of composites has the loss and gradients of the composites themselves, in float64."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForImageTextToText,
    AyaVisionConfig,
    Cohere2VisionConfig,
    Ernie4_5_VLMoeConfig,
    Glm4vConfig,
    PreTrainedModel,
)
from transformers.models.cohere2.modeling_cohere2 import Cohere2LayerNorm

from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub import composite_text
from automodel_cli.models.lm_head.detection import detect_head
from automodel_cli.models.lm_head.scores import HeadKind
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.transformers_compat import CACHE_ARGUMENTS
from tests import vision
from tests.tiny import gradient_error, gradients, packed_batch, perturb, token_row

WITHOUT_CAUSAL_CLASS = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "glm4v",
    "glm4v_moe",
    "ernie4_5_vl_moe",
)
UNSCALED = {"cohere2_vision": 0.25, "aya_vision": 0.0625}
"""Composites without the scale of their text config's causal class, and that scale."""
LENGTHS = (9, 14, 23)
FLOAT32_ROUTERS = ("glm4v_moe", "ernie4_5_vl_moe")
"""Their routers compute in float32 for every dtype, so roundings differ."""
_SIGLIP = {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
_SIGLIP |= {"num_attention_heads": 4, "image_size": 16, "patch_size": 4}


def config_of(kind: str) -> Any:
    text = vision.TEXT | {"vocab_size": 160, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    if kind in UNSCALED:
        family = Cohere2VisionConfig if kind == "cohere2_vision" else AyaVisionConfig
        text |= {"model_type": "cohere2", "logit_scale": UNSCALED[kind]}
        return family(text_config=text, vision_config=_SIGLIP, downsample_factor=2, alignment_intermediate_size=48)
    if kind == "glm4v":
        moe = vision.config_of("glm4v_moe")
        rope = moe.text_config.rope_parameters
        return Glm4vConfig(text_config=text | {"rope_parameters": rope}, vision_config=moe.vision_config.to_dict())
    if kind == "ernie4_5_vl_moe":
        text |= {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [32, 32], "moe_num_shared_experts": 1}
        text["rope_parameters"] |= {"mrope_section": [1, 1, 2]}
        tower = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "patch_size": 4}
        return Ernie4_5_VLMoeConfig(text_config=text, vision_config=tower)
    config = vision.config_of(kind)
    config.text_config.vocab_size = 160
    return config


def composite_of(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(config_of(kind), attn_implementation="sdpa").double().eval()
    whole.set_experts_implementation("eager")  # grouped kernels have no float64
    perturb(whole, 1)
    return whole


def text_part(whole: PreTrainedModel, folder: Path) -> ModelPart:
    """The part that a run on text trains, from the repository of the composite."""
    whole.save_pretrained(folder)
    config = ModelConfig(pretrained=str(folder), dtype="float64")
    part = build_part(config)
    load_weights(part, config, device="cpu", seed=0)
    part.model.set_experts_implementation("eager")
    return part.eval()


def layer_norm(self: Any, hidden: Tensor) -> Tensor:
    """The norm of Cohere without its cast to float32."""
    return F.layer_norm(hidden, hidden.shape[-1:], self.weight, eps=self.variance_epsilon)


def loss(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE_INDEX, reduction="sum")


def shaped(logits_TV: Tensor, kind: HeadKind) -> Tensor:
    assert kind.name in ("plain", "scale")
    return logits_TV * kind.value if kind.name == "scale" else logits_TV


@pytest.mark.parametrize("kind", [*WITHOUT_CAUSAL_CLASS, *UNSCALED])
def test_packed_text_has_the_loss_and_gradients_of_the_composite(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(Cohere2LayerNorm, "forward", layer_norm)
    loss_bound, gradient_bound = (1e-8, 1e-6) if kind in FLOAT32_ROUTERS else (1e-12, 1e-12)
    whole = composite_of(kind)
    text = whole.config.get_text_config()
    assert (type(text) in MODEL_FOR_CAUSAL_LM_MAPPING) == (kind in UNSCALED)
    part = text_part(whole, tmp_path)
    documents = [token_row(length, seed) for seed, length in enumerate(LENGTHS)]
    want = sum(loss(whole(input_ids=ids_T[None], use_cache=False).logits[0, :-1], ids_T[1:]) for ids_T in documents)
    want.backward()
    batch = packed_batch([documents[:2], documents[2:]])
    hidden_BTD = part.hidden(batch.model_inputs())
    logits_BTV = shaped(part.model.get_output_embeddings()(hidden_BTD), part.head.kind)
    got = loss(logits_BTV.flatten(0, 1), batch.labels_BT.flatten())
    got.backward()
    assert abs(got - want) < loss_bound * abs(want)
    name = composite_text.text_module(whole)
    expected = gradients(whole.get_submodule(str(name)))
    assert expected.keys() == gradients(part.model.base_model).keys()
    assert gradient_error(expected, gradients(part.model.base_model)) < gradient_bound
    head = gradients(whole.get_output_embeddings())
    assert gradient_error(head, gradients(part.model.get_output_embeddings())) < gradient_bound


def test_the_forward_does_not_use_the_old_name_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    part, warnings = text_part(composite_of("qwen3_vl"), tmp_path), []
    monkeypatch.setattr(logging.Logger, "warning_once", lambda logger, message: warnings.append(message))
    output = part.model(input_ids=token_row(9, 0)[None], use_cache=True)
    assert any(output[name] is not None for name in output if name in CACHE_ARGUMENTS)
    assert warnings == []


@pytest.mark.parametrize("kind", UNSCALED)
def test_the_causal_class_would_train_another_temperature(kind: str, tmp_path: Path):
    whole = composite_of(kind)
    text = whole.config.get_text_config()
    assert detect_head(text).value == pytest.approx(UNSCALED[kind])
    part = text_part(whole, tmp_path)
    assert part.head.kind.name == "plain"
