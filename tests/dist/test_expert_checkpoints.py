"""Weights and checkpoints of experts over ranks: what is read, what is written, and from one layout to another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from automodel_cli.distributed.mesh import Mesh, build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.parallelizer import parallelize
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.export import export_hf
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.objectives.sft import SFT
from automodel_cli.pipelining.build_stages import build_stages
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.training.checkpoint.checkpointer import Checkpointer
from automodel_cli.training.config import CheckpointConfig
from automodel_cli.training.optimizers.lr_scheduler import Cosine
from automodel_cli.training.optimizers.nodes import AdamW
from automodel_cli.training.stages import SingleStage, Stages
from automodel_cli.training.step import train_step
from tests.dist.harness import launch, launch_all
from tests.dist.parity import FSDP2, microbatch
from tests.exports import verify_export
from tests.marks import nightly
from tests.quantize import to_fp8, to_mxfp4
from tests.tiny import build_hf, full, tiny_fields, token_row

pytestmark = pytest.mark.slow

FAMILIES = ("qwen3_moe", "gpt_oss", "deepseek_v3")
EP2, EP4, PP2_EP2 = MeshConfig(ep_size=2), MeshConfig(ep_size=4), MeshConfig(pp_size=2, ep_size=2)


def build(config: ModelConfig, mesh: Mesh) -> tuple[Stages, int]:
    """What a recipe builds, loaded, and the bytes that this rank read."""
    part = build_part(config)
    if mesh.layout.pp == 1:
        stages: Stages = SingleStage(parallelize(part, mesh, FSDP2))
    else:
        pipeline = PipelineConfig(schedule="zbv")
        stages = build_stages(part, mesh, pipeline, FSDP2, num_microbatches=4)
    reports = [load_weights(part, config, device="cpu", seed=3) for part in stages.parts]
    return stages, sum(report.num_bytes_read for report in reports)


def _load(rank: int, world: int, folder: str, layout: MeshConfig):
    """(bytes read, bytes held, names of parameters that differ from those of the whole model)."""
    mesh, config = build_mesh(layout.resolve(world), "cpu"), ModelConfig(pretrained=folder)
    stages, num_bytes = build(config, mesh)
    alone = build_part(config)
    load_weights(alone, config, device="cpu", seed=3)
    reference = dict(alone.named_parameters())
    named = [item for part in stages.parts for item in part.named_parameters()]
    wrong = [name for name, param in named if not torch.equal(full(param), reference[name])]
    persistent = [b for part in stages.parts for n, b in part.named_buffers() if "correction_bias" in n]
    held = sum(t.numel() * t.element_size() for t in [*(p.to_local() for _, p in named), *persistent])
    return num_bytes, held, wrong


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("deepseek_v3", EP2),
        ("gpt_oss", EP4),
        *(pytest.param(family, EP2, marks=pytest.mark.nightly) for family in ("qwen3_moe", "gpt_oss")),
        *(pytest.param(family, EP4, marks=pytest.mark.nightly) for family in ("qwen3_moe", "deepseek_v3")),
    ],
)
def test_a_rank_reads_the_bytes_that_it_holds(family, layout, tmp_path: Path):
    """Of one file per expert, as of experts in one tensor (GPT-OSS)."""
    build_hf(family, num_hidden_layers=2).save_pretrained(tmp_path, max_shard_size="400KB")
    for read, held, wrong in launch_all(_load, 4, str(tmp_path), layout):
        assert not wrong
        assert read == held


@pytest.mark.parametrize(("family", "quantize"), [("gpt_oss", to_mxfp4), ("deepseek_v3", to_fp8)])
def test_quantised_checkpoints_load_into_experts_over_ranks(family, quantize, tmp_path: Path):
    build_hf(family, num_hidden_layers=2).bfloat16().save_pretrained(tmp_path)
    quantize(tmp_path)
    total = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    for read, _, wrong in launch_all(_load, 4, str(tmp_path), EP2):
        assert not wrong
        assert read < 0.45 * total


def _export(rank: int, world: int, base: str, out: str, layout: MeshConfig) -> float:
    mesh, config = build_mesh(layout.resolve(world), "cpu"), ModelConfig(pretrained=base)
    stages, _ = build(config, mesh)
    group = mesh.pp.get_group() if mesh.layout.pp > 1 else None
    export_hf(stages.parts, config, None, out, shard_bytes=300_000, pp_group=group)
    return verify_export(out, stages.parts, [token_row(12, 4).tolist()]) if group is None else 0.0


@pytest.mark.parametrize("family", ["deepseek_v3", *nightly("gpt_oss", "qwen3_moe")])
def test_exports_are_those_of_one_process(family, tmp_path: Path):
    base = tmp_path / "base"
    build_hf(family).save_pretrained(base, max_shard_size="400KB")
    contents = []
    for name, world, layout in (("one", 1, MeshConfig()), ("ep2", 4, EP2), ("pp2 ep2", 4, PP2_EP2)):
        assert launch(_export, world, str(base), str(tmp_path / name), layout) < 1e-5
        files = sorted((tmp_path / name).glob("*.safetensors"))
        contents.append({key: tensor for file in files for key, tensor in load_file(file).items()})
    original = {key: tensor for file in base.glob("*.safetensors") for key, tensor in load_file(file).items()}
    for exported in contents:
        assert exported.keys() == original.keys()
        assert all(torch.equal(tensor, original[key]) for key, tensor in exported.items())


def _train(rank: int, world: int, layout: MeshConfig, folder: str, steps: int, resume: str | None):
    """Losses and gradient norms of `steps` more steps, and the path of the checkpoint after them. Every layout sees
    the same four microbatches."""
    mesh, config = build_mesh(layout.resolve(world), "cpu"), ModelConfig(config=tiny_fields("qwen3_moe"))
    stages, _ = build(config, mesh)
    optimizer = AdamW(lr=1e-2).build(stages.parts)
    scheduler = Cosine(warmup_steps=0).build(optimizer, 10)
    checkpointer = Checkpointer(Path(folder), CheckpointConfig(resume=resume, async_save=False))
    start = 0
    if (path := checkpointer.resume_path()) is not None:
        start = checkpointer.load(path, stages.parts, optimizer, scheduler).step
    per_rank = 4 // mesh.dp_size
    batches = [microbatch(mesh.dp_rank * per_rank + i, packed=True) for i in range(per_rank)]
    numbers = []
    for _ in range(steps):
        result = train_step(stages, batches, SFT(), optimizer, mesh, max_grad_norm=1.0)
        scheduler.step()
        numbers.append((result.loss.item(), result.grad_norm.item()))
    saved = checkpointer.save(start + steps, stages.parts, optimizer, scheduler)
    dist.barrier()
    return numbers, str(saved)


@pytest.mark.nightly
def test_checkpoints_load_under_any_other_layout(tmp_path: Path):
    """ep 2 x 2 shards -> one process -> ep 4 -> ep 2, against a run in one process that never stops."""
    want, _ = launch(_train, 1, MeshConfig(), str(tmp_path / "whole"), 4, None)
    got, saved = [], None
    for i, (world, layout) in enumerate([(4, EP2), (1, MeshConfig()), (4, EP4), (2, MeshConfig(ep_size=2))]):
        numbers, saved = launch(_train, world, layout, str(tmp_path / f"part-{i}"), 1, saved)
        got += numbers
    assert torch.allclose(torch.tensor(got), torch.tensor(want), rtol=5e-6)
