"""Loading into FSDP2 shards: each rank reads its own bytes and the whole equals the unsharded model, exports too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.export import export_hf
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.checkpoint_io.weight_stream import iter_hf_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.model_part import ModelPart
from tests.dist.harness import launch, launch_all
from tests.exports import verify_export
from tests.quantize import to_fp8, to_mxfp4
from tests.tiny import build_hf, full, packed_batch, tiny_fields, token_row

pytestmark = pytest.mark.slow

FAMILIES = ["qwen3", "gemma3_text", "qwen3_moe", "gpt_oss", "deepseek_v3"]
ROWS = [[token_row(9), token_row(6, 1)]]


def _sharded(config: ModelConfig, world: int) -> tuple[ModelPart, int]:
    """A part under plain FSDP2 (layers, then the root), and the bytes this rank read."""
    part = build_part(config)
    mesh = init_device_mesh("cpu", (world,))
    for layer in part.model.base_model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(part, mesh=mesh)
    report = load_weights(part, config, device="cpu", seed=3)
    return part, report.num_bytes_read


def _alone(config: ModelConfig) -> ModelPart:
    part = build_part(config)
    load_weights(part, config, device="cpu", seed=3)
    return part


def _compare_with_alone(config: ModelConfig, world: int) -> int:
    part, num_bytes = _sharded(config, world)
    alone = _alone(config)
    reference = dict(alone.named_parameters())
    for name, param in part.named_parameters():
        assert not param.is_meta and param.requires_grad == reference[name].requires_grad
        assert torch.equal(full(param), reference[name]), name
    buffers = dict(alone.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in part.named_buffers())
    batch = packed_batch(ROWS)
    logprobs, expected = (p(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT for p in (part, alone))
    assert torch.allclose(logprobs, expected, atol=1e-6)
    logprobs.sum().backward()  # the loaded shards are those that FSDP trains
    assert all(p.grad is not None for p in part.parameters() if p.requires_grad)
    return num_bytes


def _check_checkpoint(rank: int, world: int, folder: str, lora: bool) -> int:
    config = ModelConfig(pretrained=folder, lora=LoRAConfig(rank=4) if lora else None)
    return _compare_with_alone(config, world)


def _check_checkpoints(rank: int, world: int, folders: list[str]) -> list[int]:
    return [_check_checkpoint(rank, world, folder, False) for folder in folders]


def test_each_rank_reads_its_own_bytes(tmp_path: Path):
    folders = [tmp_path / family for family in FAMILIES]
    for folder in folders:
        build_hf(folder.name, num_hidden_layers=2).save_pretrained(folder, max_shard_size="400KB")
    for read in launch_all(_check_checkpoints, 2, [str(folder) for folder in folders]):
        for folder, num_bytes in zip(folders, read, strict=True):
            total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            assert abs(num_bytes / total - 0.5) < 0.05, folder.name


@pytest.mark.parametrize(("family", "quantize"), [("gpt_oss", to_mxfp4), ("deepseek_v3", to_fp8)])
def test_each_rank_dequantises_its_own_part_of_a_quantised_checkpoint(family: str, quantize, tmp_path: Path):
    """`_compare_with_alone` holds every shard against the same checkpoint read whole, which the unit test checks."""
    build_hf(family, num_hidden_layers=2).bfloat16().save_pretrained(tmp_path)
    quantize(tmp_path)
    total = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    read = launch_all(_check_checkpoint, 2, str(tmp_path), False)
    assert all(num_bytes / total < 0.65 for num_bytes in read), (read, total)


def test_adapters_on_a_sharded_base(tmp_path: Path):
    build_hf("llama", num_hidden_layers=2).save_pretrained(tmp_path)
    launch(_check_checkpoint, 2, str(tmp_path), True)


def _check_random(rank: int, world: int, families: list[str]) -> None:
    for family in families:
        _compare_with_alone(ModelConfig(config=tiny_fields(family, num_hidden_layers=2)), world)


@pytest.mark.parametrize("world", [1, 3])
def test_random_weights_do_not_depend_on_the_layout(world: int):
    launch(_check_random, world, ["llama", "gemma3_text", "deepseek_v3"])


def _export(rank: int, world: int, base: str, out: str, lora: bool) -> float:
    config = ModelConfig(pretrained=base, lora=LoRAConfig(rank=4) if lora else None)
    part, _ = _sharded(config, world)
    with torch.no_grad():
        for name, param in part.named_parameters():
            if "lora_B" in name:
                param.fill_(0.02)
    stream = dict(item for bucket in iter_hf_weights([part], bucket_bytes=50_000) for item in bucket)
    assert all(type(tensor) is torch.Tensor for tensor in stream.values())
    export_hf([part], config, None, out, shard_bytes=300_000)
    return verify_export(out, [part], [token_row(12, 4).tolist()])


@pytest.mark.parametrize(("family", "lora"), [("qwen3_moe", False), ("gemma3_text", True)])
def test_sharded_export_reloads(family: str, lora: bool, tmp_path: Path):
    build_hf(family, num_hidden_layers=2).save_pretrained(tmp_path / "base")
    for difference in launch_all(_export, 2, str(tmp_path / "base"), str(tmp_path / "out"), lora):
        assert difference < 1e-5
