"""Tiny vision-language models with their processors, and rows with pictures."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    Gemma3Config,
    Glm4vMoeConfig,
    LlavaConfig,
    LlavaProcessor,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from automodel_cli.models.vision.nodes import GemmaProcessor, QwenProcessor, WordTokenizer

WORDS = ("a", "picture", "of", "one", "two", "three", "what", "is", "here", "and", "there", "short", "yes", "no")
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_QWEN = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
_IDS = {"image_token_id": 2, "vision_start_token_id": 3, "vision_end_token_id": 4, "video_token_id": 5}
_CLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}


def config_of(kind: str) -> Any:
    """A config with random weights: qwen3_vl, qwen3_vl_moe, qwen2_vl, qwen2_5_vl, glm4v_moe, llava or gemma3."""
    if kind == "qwen3_vl":
        return Qwen3VLConfig(text_config=TEXT | {"rope_parameters": _ROPE}, vision_config=_QWEN, **_IDS)
    if kind == "qwen3_vl_moe":
        moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
        text = TEXT | moe | {"rope_parameters": _ROPE, "mlp_only_layers": []}
        return Qwen3VLMoeConfig(text_config=text, vision_config=_QWEN, **_IDS)
    if kind == "llava":
        return LlavaConfig(
            text_config={"model_type": "llama", **TEXT},
            vision_config={"model_type": "clip_vision_model", **_CLIP},
            image_token_index=2,
            image_token_id=2,
            vision_feature_select_strategy="default",
        )
    if kind == "qwen2_5_vl":
        vision = {k: v for k, v in _QWEN.items() if k not in ("num_position_embeddings", "deepstack_visual_indexes")}
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
        return Qwen2_5_VLConfig(text_config=TEXT | {"rope_parameters": _ROPE}, vision_config=vision, **_IDS)
    if kind == "qwen2_vl":
        vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4}
        vision |= {"spatial_merge_size": 2, "temporal_patch_size": 1}
        return Qwen2VLConfig(text_config=TEXT | {"rope_parameters": _ROPE}, vision_config=vision, **_IDS)
    if kind == "glm4v_moe":
        vision = {k: v for k, v in _QWEN.items() if k not in ("num_position_embeddings", "deepstack_visual_indexes")}
        moe = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
        text = TEXT | moe | {"n_group": 1, "topk_group": 1, "rope_parameters": _ROPE | {"partial_rotary_factor": 1.0}}
        ids = {"image_token_id": 2, "image_start_token_id": 3, "image_end_token_id": 4, "video_token_id": 5}
        ids |= {"video_start_token_id": 6, "video_end_token_id": 7}
        return Glm4vMoeConfig(text_config=text, vision_config=vision | {"image_size": 16}, **ids)
    assert kind == "gemma3"
    vision = {**_CLIP, "model_type": "siglip_vision_model"}
    text = TEXT | {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    ids = {"image_token_index": 2, "boi_token_index": 3, "eoi_token_index": 4}
    return Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=16, **ids)


def processor_of(kind: str) -> Any:
    """The processor of such a model, around a tokenizer with one token for each word."""
    tokenizer = WordTokenizer(WORDS).build()
    if kind.startswith(("qwen", "glm")):
        node = QwenProcessor(patch_size=4, merge_size=2, temporal_patch_size=1, min_pixels=64, max_pixels=1024)
        return node.build_processor(tokenizer)
    if kind == "gemma3":
        return GemmaProcessor(image_size=16, num_tokens=16).build_processor(tokenizer)
    pixels = CLIPImageProcessorPil(size={"height": 16, "width": 16}, crop_size={"height": 16, "width": 16})
    tokenizer.chat_template = tokenizer.chat_template.replace("<|vision_start|>", "").replace("<|vision_end|>", "")
    return LlavaProcessor(
        image_processor=pixels,
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<|image_pad|>",
        chat_template=tokenizer.chat_template,
    )


def model_of(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A composite with random weights, noise on every parameter."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config_of(kind), attn_implementation="sdpa").to(dtype).eval()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.02)
    return model


def repository(kind: str, folder: Path) -> PreTrainedModel:
    """A folder with weights, tokenizer and processor files."""
    model = model_of(kind)
    model.save_pretrained(folder)
    processor = processor_of(kind)
    processor.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    return model


def noise(height: int, width: int, seed: int = 0) -> Image.Image:
    """A picture of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The file of a picture."""
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def documents_of(processor: Any) -> list[tuple[torch.Tensor, list[Image.Image]]]:
    """Documents (ids, pictures) with 2, 0, 1 and 3 pictures."""
    found = []
    for number, sizes in enumerate((((16, 24), (24, 16)), (), ((16, 16),), ((16, 16), (32, 16), (16, 24)))):
        generator = torch.Generator().manual_seed(number)
        pieces = [torch.randint(10, 60, (5,), generator=generator)]
        for size in sizes:
            run = torch.from_numpy(processor.replacement(*size).astype("int64"))
            pieces += [run, torch.randint(10, 60, (3,), generator=generator)]
        images = [noise(*size, seed=10 * number + nth) for nth, size in enumerate(sizes)]
        found.append((torch.cat(pieces), images))
    return found


def rows(folder: Path, number: int, *, share: float = 0.6) -> Path:
    """A file of chats, some of which have one or two pictures in files beside it."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for index in range(number):
        count = rng.randint(1, 2) if rng.random() < share else 0
        names = []
        for nth in range(count):
            names.append(f"{index}_{nth}.png")
            image = noise(rng.choice((16, 24, 40)), rng.choice((16, 32)), seed=rng.randrange(10**6))
            (folder / names[-1]).write_bytes(encoded(image))
        question = " ".join(["<image>"] * count + ["what is here"])
        answer = " ".join(rng.choices(WORDS, k=rng.randint(2, 5)))
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": messages, "images": names}))
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def pairs(folder: Path, number: int, *, share: float = 0.6) -> Path:
    """A file of preference pairs, some of whose prompts show one or two pictures."""
    path = rows(folder, number, share=share)
    lines = []
    for index, row in enumerate(map(json.loads, path.read_text().splitlines())):
        rng = random.Random(index)
        responses = [" ".join(rng.choices(WORDS, k=rng.randint(2, 5))) for _ in range(2)]
        pair = {"prompt": row["messages"][0]["content"], "chosen": responses[0], "rejected": responses[1]}
        lines.append(json.dumps(pair | {"images": row["images"]}))
    path.write_text("\n".join(lines) + "\n")
    return path
