"""The language model of a multimodal repository trains alone, and the export is the whole repository."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file

from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.export import export_hf
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lora.export import save_adapters
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.model_part import ModelPart
from tests.composites import KINDS, repository, tensors
from tests.exports import verify_export
from tests.tiny import packed_batch, token_row


def loaded(folder: Path) -> tuple[ModelPart, ModelConfig]:
    config = ModelConfig(pretrained=str(folder))
    part = build_part(config)
    load_weights(part, config, device="cpu", seed=0)
    return part, config


@pytest.mark.parametrize("kind", KINDS)
def test_the_language_model_alone_gives_what_the_composite_gives(kind: str, tmp_path: Path):
    whole = repository(kind, tmp_path)
    part, _ = loaded(tmp_path)
    assert not any("vis" in name for name, _ in part.named_parameters())
    ids_T = token_row(17)
    batch = packed_batch([[ids_T]])
    with torch.no_grad():
        want = whole(input_ids=ids_T[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        got = part.eval()(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT[0, :-1]
    assert (got - want.gather(-1, ids_T[1:, None])[:, 0]).abs().max() < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_the_export_is_the_repository_with_other_text_weights(kind: str, tmp_path: Path):
    original, export = tmp_path / "original", tmp_path / "export"
    repository(kind, original)
    part, config = loaded(original)
    trained = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        part.model.get_parameter(trained).add_(1.0)
    export_hf([part], config, None, export)
    before, after = tensors(original), tensors(export)
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == [name for name in before if name.endswith("layers.1.mlp.up_proj.weight") and "vis" not in name]
    assert len(changed) == 1
    for path in original.iterdir():
        if path.suffix != ".safetensors":
            assert (
                hashlib.sha256((export / path.name).read_bytes()).digest() == hashlib.sha256(path.read_bytes()).digest()
            )
    assert verify_export(export, [part], [token_row(9).tolist()]) < 1e-5


def test_adapters_have_the_names_of_the_composite(tmp_path: Path):
    """peft puts them into the library's whole model, and only there where they were trained."""
    whole = repository("gemma3", tmp_path / "original")
    lora = LoRAConfig(rank=4)
    config = ModelConfig(pretrained=str(tmp_path / "original"), lora=lora)
    part = build_part(config)
    load_weights(part, config, device="cpu", seed=0)
    with torch.no_grad():
        for name, param in part.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.1)
    save_adapters([part], lora, tmp_path / "adapter", base_model="", write=True)
    ids_T = token_row(17)
    batch = packed_batch([[ids_T]])
    with torch.no_grad():
        got = part.eval()(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT[0, :-1]
        adapted = PeftModel.from_pretrained(whole, str(tmp_path / "adapter")).eval()
        logits_TV = adapted(input_ids=ids_T[None], use_cache=False).logits[0, :-1]
    assert (got - logits_TV.log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0]).abs().max() < 1e-5
    assert not any("vision" in name and "lora" in name for name, _ in adapted.named_parameters())


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_composite_under_the_names_of_older_repositories_is_read_and_written_back(tmp_path: Path):
    """Gemma 3's own repository has `language_model.model.` where today's library says `model.language_model.`."""
    original = tmp_path / "original"
    repository("gemma3", original)
    older = {
        name.replace("model.language_model.", "language_model.model.").replace(
            "model.vision_tower.", "vision_tower."
        ): t
        for name, t in tensors(original).items()
    }
    save_file(older, original / "model.safetensors", metadata={"format": "pt"})
    part, config = loaded(original)
    export_hf([part], config, None, tmp_path / "export")
    after = tensors(tmp_path / "export")
    assert after.keys() == older.keys() and all(torch.equal(after[name], older[name]) for name in older)
