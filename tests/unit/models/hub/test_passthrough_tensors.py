"""What a checkpoint holds and the model does not build is in the export, bit for bit."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.export import export_hf
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub import passthrough_tensors
from automodel_cli.models.model_part import ModelPart
from tests.tiny import build_hf

# Names as in DeepSeek-V3's repository, whose layer after the last one is for multi-token prediction; and others.
EXTRA = {
    "model.layers.4.eh_proj.weight": torch.randn(64, 128, generator=torch.Generator().manual_seed(1)),
    "model.layers.4.mlp.experts.0.gate_proj.weight": torch.randn(48, 64).bfloat16(),
    "model.layers.4.mlp.experts.1.gate_proj.weight": torch.randn(48, 64).bfloat16(),
    "model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(4),
    "vision_tower.patches": torch.arange(6, dtype=torch.int64),
    "logit_scale": torch.tensor(2.5),
}


def checkpoint(folder: Path) -> ModelConfig:
    build_hf("deepseek_v3").save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors") | EXTRA
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return ModelConfig(pretrained=str(folder))


def loaded(config: ModelConfig) -> ModelPart:
    part = build_part(config)
    load_weights(part, config, device="cpu", seed=0)
    return part


def written(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_an_export_has_every_tensor_of_the_original(tmp_path: Path):
    config = checkpoint(tmp_path / "original")
    part = loaded(config)
    assert sorted(part.unclaimed) == sorted(EXTRA)
    export_hf([part], config, None, tmp_path / "export", shard_bytes=100_000)
    before, after = load_file(tmp_path / "original" / "model.safetensors"), written(tmp_path / "export")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name


def test_what_is_carried_is_said_in_one_line(tmp_path: Path):
    config = checkpoint(tmp_path)
    summary = passthrough_tensors.passthrough_summary(config, loaded(config).unclaimed)
    assert "6 tensors" in summary and "0.0 GB" in summary
    assert summary.endswith(": logit_scale, model.layers.0.*, model.layers.4.*, vision_tower.*")


def test_a_model_that_claims_everything_carries_nothing(tmp_path: Path):
    build_hf("qwen3_moe").save_pretrained(tmp_path)
    assert not loaded(ModelConfig(pretrained=str(tmp_path))).unclaimed
