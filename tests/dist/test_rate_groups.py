"""Rates per part and per layer on two ranks: three steps of one process with torch's AdamW and groups by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from automodel_cli.distributed.config import DDPConfig
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.models.checkpoint_io.weight_stream import iter_hf_weights
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.batches import step_batches
from automodel_cli.parity.cases import Case
from automodel_cli.parity.compare import build_parity_stages
from automodel_cli.parity.reference import Original
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.training.optimizers.build import build_optimizer
from automodel_cli.training.optimizers.nodes import AdamW
from automodel_cli.training.optimizers.rate_groups import ParamGroup
from automodel_cli.training.step import train_step
from tests import tiny
from tests.dist.harness import launch

pytestmark = pytest.mark.slow

LAYERS, RATE, DECAY, EPS = 4, 1e-2, 0.1, 1e-2  # the large eps: small gradients stay small changes
NODE = AdamW(
    lr=RATE,
    eps=EPS,
    weight_decay=DECAY,
    groups=[ParamGroup(["mlp"], lr=3e-2), ParamGroup(["embed_tokens"], lr_scale=0.5, weight_decay=0.3)],
    layer_decay=0.5,
)
ROWS = {
    "fsdp2": Case(MeshConfig(dp_size=2)),
    "ddp": Case(MeshConfig(dp_size=2), DDPConfig()),
    "pp2": Case(MeshConfig(dp_size=1, pp_size=2), pipeline=PipelineConfig(schedule="1f1b")),
    "tp2": Case(MeshConfig(dp_size=1, tp_size=2)),
    "cp2": Case(MeshConfig(dp_size=1, cp_size=2)),
}


def _by_hand(parts: list[nn.Module]) -> torch.optim.Optimizer:
    groups = []
    for name, param in (named for part in parts for named in part.named_parameters()):
        rate, decay = RATE, DECAY if param.ndim > 1 else 0.0
        layer = re.search(r"layers\.(\d+)\.", name)
        distance = LAYERS - int(layer[1]) if layer else 0
        if ".mlp." in name:
            rate = 3e-2
        if "embed_tokens" in name:
            rate, decay, distance = RATE / 2, 0.3, LAYERS + 1
        groups.append({"params": [param], "lr": rate * 0.5**distance, "weight_decay": decay})
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=EPS)


def _trained(rank: int, world: int, original: Original, rows: list[Case], by_hand: bool) -> list[dict[str, Tensor]]:
    found = []
    for row in rows:
        mesh = build_mesh(row.mesh.resolve(world), "cpu")
        stages = build_parity_stages(original, row, mesh)
        optimizer = _by_hand(stages.parts) if by_hand else build_optimizer(NODE, stages.parts)
        every = step_batches(packed=True, count=row.num_microbatches)
        count = len(every) // mesh.dp_size
        for _ in range(3):
            train_step(stages, every[mesh.dp_rank * count :][:count], SFT(), optimizer, mesh, max_grad_norm=None)
        stream = iter_hf_weights(stages.parts, device="cpu", pp_group=stages.pp_group)
        found.append({name: value.clone() for bucket in stream for name, value in bucket})
    return found


@pytest.mark.parametrize("names", [["pp2"], [n for n in ROWS if n != "pp2"]])
def test_each_layout_trains_every_part_at_its_rate(names: list[str], tmp_path: Path) -> None:
    _check("llama", [ROWS[name] for name in names], tmp_path)


def test_experts_over_ranks_train_at_their_rates(tmp_path: Path) -> None:
    _check("qwen3_moe", [Case(MeshConfig(dp_size=2, ep_size=2))], tmp_path)


def _check(family: str, rows: list[Case], folder: Path) -> None:
    model = tiny.build_hf(family, num_hidden_layers=LAYERS, tie_word_embeddings=False)
    original = Original.write(folder / "model", model, SFT(), kinds=(), counts=())
    (want,) = launch(_trained, 1, original, [Case(MeshConfig(dp_size=1))], True)
    for row, found in zip(rows, launch(_trained, 2, original, rows, False), strict=True):
        assert found.keys() == want.keys()
        for name, value in want.items():
            assert torch.allclose(found[name], value, rtol=0, atol=2e-6), (row, name)
            assert (value - model.state_dict().get(name, value + 1)).abs().max() > 1e-5, name
