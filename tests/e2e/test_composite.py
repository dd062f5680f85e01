"""A multimodal repository in a local folder, fine-tuned on text through the command line."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.composites import repository, tensors
from tests.e2e.command import automodel, curve, write_config

pytestmark = pytest.mark.slow


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_the_export_differs_from_the_repository_in_the_text_weights_only(tmp_path: Path):
    original = tmp_path / "gemma"
    repository("gemma3", original, vocab_size=2048)
    write_config(tmp_path)
    done = automodel(
        tmp_path,
        *("finetune", "llm", "-c", "tiny.yaml", "model.config=null", f"model.pretrained={original}"),
        *("train.max_steps=10", "checkpoint.every=10"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "copied to the export: " in done.stdout and "vision_tower" in done.stdout
    run = tmp_path / "runs" / "tiny"
    losses = curve(run)
    assert losses[-1] < losses[0]
    before, after = tensors(original), tensors(run / "export")
    assert before.keys() == after.keys()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if "language_model" not in name}
    for path in original.iterdir():
        if path.suffix != ".safetensors":
            assert _hash((run / "export" / path.name).read_bytes()) == _hash(path.read_bytes()), path.name
    table = next(name for name in after if name.endswith("embed_tokens.weight"))
    reloaded = AutoModelForImageTextToText.from_pretrained(run / "export")
    assert torch.equal(reloaded.get_input_embeddings().weight, after[table])
