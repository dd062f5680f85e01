"""A multimodal repository in a local folder, fine-tuned on text through the command line."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, Gemma3Config

from tests.e2e.command import automodel, curve, write_config

_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 2048,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_the_export_differs_from_the_repository_in_the_text_weights_only(tmp_path: Path):
    original = tmp_path / "gemma"
    torch.manual_seed(0)
    config = Gemma3Config(text_config=_TEXT, vision_config=_VISION, mm_tokens_per_image=4)
    AutoModelForImageTextToText.from_config(config).float().save_pretrained(original)
    (original / "preprocessor_config.json").write_text('{"image_mean": [0.5]}\n')
    write_config(tmp_path)
    done = automodel(
        tmp_path,
        *("finetune", "llm", "-c", "tiny.yaml", "model.config=null", f"model.pretrained={original}"),
        *("train.max_steps=10", "checkpoint.every=10"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "carried to the export: " in done.stdout and "vision_tower" in done.stdout
    run = tmp_path / "runs" / "tiny"
    losses = curve(run)
    assert losses[-1] < losses[0]
    before, after = _tensors(original), _tensors(run / "export")
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if "language_model" not in name}
    for path in original.iterdir():
        if path.suffix != ".safetensors":
            assert _hash((run / "export" / path.name).read_bytes()) == _hash(path.read_bytes()), path.name
    table = next(name for name in after if name.endswith("embed_tokens.weight"))
    reloaded = AutoModelForImageTextToText.from_pretrained(run / "export")
    assert torch.equal(reloaded.get_input_embeddings().weight, after[table])
