"""Tiny multimodal models, as repositories that hold a language model and more."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    Cohere2VisionConfig,
    Gemma3Config,
    Mistral3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3VLConfig,
)

_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}


def _gemma3(text: dict) -> PretrainedConfig:
    return Gemma3Config(text_config=text, vision_config=_VISION, mm_tokens_per_image=4)


def _mistral3(text: dict) -> PretrainedConfig:
    return Mistral3Config(
        text_config={"model_type": "mistral", **text},
        vision_config={"model_type": "pixtral", **_VISION, "head_dim": 16},
        tie_word_embeddings=False,
    )


def _qwen3_5(text: dict) -> PretrainedConfig:
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    }
    vision = {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
    return Qwen3_5Config(text_config={**text, **linear}, vision_config=vision)


def _qwen3_vl(text: dict) -> PretrainedConfig:
    """A text config without a causal LM class."""
    vision = {"hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 2, "out_hidden_size": 64}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    return Qwen3VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=vision)


def _cohere2_vision(text: dict) -> PretrainedConfig:
    """A head without the scale of the text config's causal LM class."""
    return Cohere2VisionConfig(
        text_config={"model_type": "cohere2", **text, "logit_scale": 0.25},
        vision_config={"model_type": "siglip_vision_model", **_VISION},
        downsample_factor=2,
        alignment_intermediate_size=48,
    )


_CONFIGS = {
    "gemma3": _gemma3,
    "mistral3": _mistral3,
    "qwen3_5": _qwen3_5,
    "qwen3_vl": _qwen3_vl,
    "cohere2_vision": _cohere2_vision,
}
KINDS = tuple(_CONFIGS)


def repository(kind: str, folder: Path, *, vocab_size: int = 160) -> PreTrainedModel:
    """Random weights in float32, saved as the library saves them, with files that only the composite needs."""
    text = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": vocab_size,
    }
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(_CONFIGS[kind](text)).float().eval()
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5]}\n')
    (folder / "README.md").write_text("# The original\n")
    return model


def tensors(folder: Path) -> dict[str, Tensor]:
    """Everything in the safetensors files of a folder, by name."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
