"""The real path, config to optimizer steps: stages built on meta, loaded, trained by the same `train_step`."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from automodel_cli.data.batch import Batch
from automodel_cli.distributed.config import DDPConfig, FSDP2Config, MixedPrecision
from automodel_cli.distributed.mesh import Mesh, build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.parallelizer import parallelize
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.objectives.sft import SFT
from automodel_cli.pipelining.build_stages import build_stages
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.training.optimizers.nodes import AdamW
from automodel_cli.training.stages import SingleStage, Stages
from automodel_cli.training.step import train_step
from tests.dist.harness import launch
from tests.tiny import packed_batch, tiny_fields, token_row

pytestmark = pytest.mark.slow

STEPS, ROWS = 3, 4
LAYOUTS = {3: "Etttt||L"}
"""By stages. The middle one has no parameters."""


def _row(index: int) -> Batch:
    return packed_batch([[token_row(7 + index % 4, index), token_row(13 - index % 4, 1000 + index)]])


def _stages(mesh: Mesh, model: ModelConfig, schedule: str, parallelizer: Any) -> Stages:
    part = build_part(model)
    if mesh.layout.pp == 1:
        stages: Stages = SingleStage(parallelize(part, mesh, parallelizer))
    else:
        config = PipelineConfig(schedule=schedule, layout=LAYOUTS.get(mesh.layout.pp))
        stages = build_stages(part, mesh, config, parallelizer, num_microbatches=ROWS // mesh.dp_size)
    for local in stages.parts:
        load_weights(local, model, device=mesh.device, seed=3)
    return stages


def losses(rank: int, world: int, pp: int, schedule: str, family: str, tied: bool, kind: str) -> list[list[float]]:
    """Loss and gradient norm of every step."""
    replicas = 2 if kind == "hsdp" and world > 1 else 1
    mesh = build_mesh(MeshConfig(pp_size=pp, dp_replicate_size=replicas).resolve(world), "cpu")
    precision = MixedPrecision(None, None) if kind != "bf16" else MixedPrecision()
    recompute = kind == "recompute"
    parallelizer = (
        DDPConfig() if kind == "ddp" else FSDP2Config(mp_policy=precision, activation_checkpointing=recompute)
    )
    lora = LoRAConfig(rank=4, target_modules=["q_proj", "v_proj"]) if kind == "lora" else None
    model = ModelConfig(config=tiny_fields(family, tie_word_embeddings=tied), lora=lora)
    stages = _stages(mesh, model, schedule, parallelizer)
    optimizer = AdamW(lr=3e-3).build(stages.parts)
    results = []
    for _ in range(STEPS):
        rows = [_row(i) for i in range(ROWS)][mesh.dp_rank :: mesh.dp_size]
        result = train_step(stages, rows, SFT(), optimizer, mesh, max_grad_norm=1.0)
        results.append([result.loss.item(), result.grad_norm.item()])
    return results


@cache
def alone(family: str, tied: bool, kind: str) -> list[list[float]]:
    return launch(losses, 1, 1, "none", family, tied, kind)


def _compare(
    world: int,
    pp: int,
    schedule: str,
    family: str = "qwen3",
    tied: bool = False,
    kind: str = "fp32",
    tolerance: float = 1e-5,
):
    want = alone(family, tied, kind)
    got = launch(losses, world, pp, schedule, family, tied, kind)
    assert want[0][0] > want[-1][0], "it learns"
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=tolerance, atol=0)


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved_1f1b"])
def test_two_stages_train_like_one_process(schedule: str):
    _compare(2, 2, schedule, tied=schedule != "1f1b")


def test_a_stage_without_parameters_trains_like_one_process():
    _compare(3, 3, "1f1b")


def test_stages_and_data_parallelism_train_like_one_process():
    _compare(4, 2, "zb_h1", "gpt_oss")


def test_stages_and_hybrid_sharding_train_like_one_process():
    """Two stages, each on two replicas of two shards; the tied table is on both stages."""
    _compare(8, 2, "gpipe", tied=True, kind="hsdp")


def test_plain_data_parallelism_needs_no_wrapper():
    _compare(4, 2, "zbv", kind="ddp")


@pytest.mark.parametrize("schedule", ["zbv", "1f1b"])
def test_adapters_on_a_frozen_base(schedule: str):
    _compare(2, 2, schedule, kind="lora")


def test_recomputed_layers():
    _compare(2, 2, "dualpipev", "deepseek_v3", kind="recompute")


def test_bf16_between_stages():
    """Boundary tensors have the dtype that the policy computes in."""
    _compare(2, 2, "1f1b", kind="bf16", tolerance=2e-2)
