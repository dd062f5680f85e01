"""Layers for multi-token prediction under every parallelism, against their definition in one process, in float64.

Loss, the loss of the further tokens, and every gradient of a real optimizer step over packed rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from automodel_cli.distributed.config import DDPConfig
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.models.build import build_part
from automodel_cli.models.config import ModelConfig, MTPConfig
from automodel_cli.models.load import load_weights
from automodel_cli.models.part import ModelPart
from automodel_cli.objectives.base import request_of
from automodel_cli.objectives.multi_token import WithMultiToken
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.batches import step_batches
from automodel_cli.parity.compare import Recorder
from automodel_cli.parity.gradients import gradient_errors, missing, worst_of
from automodel_cli.parity.rows import Row
from automodel_cli.pipelining import build
from automodel_cli.training.step import train_step
from tests import multi_token
from tests.dist.harness import launch
from tests.dist.test_composed import row
from tests.multi_token import ByHand

TOLERANCE = 1e-6
# The definition is in float64. In float32 one process is off by 7e-7, and the tables' gradients, whose sums tensor
# parallelism makes in parts, by 1.5e-6.
OF_PARTIAL_SUMS = 3e-6
WEIGHT = 0.3


@dataclass
class Outcome:
    loss: float
    mtp_loss: float
    gradient: float
    name: str

    @property
    def worst(self) -> float:
        return max(self.loss, self.mtp_loss, self.gradient)


def run(rank: int, world: int, folder: str, want: ByHand, rows: Sequence[Row]) -> list[Outcome]:
    """A step of every row, whose worst errors over ranks rank 0 returns."""
    return [_run(folder, want, r) for r in rows]


def _run(folder: str, want: ByHand, r: Row) -> Outcome:
    mesh = build_mesh(r.mesh.resolve(dist.get_world_size()), "cpu")
    every = step_batches(packed=True, count=r.num_microbatches)
    count = len(every) // mesh.dp_size
    config = ModelConfig(pretrained=folder, mtp=MTPConfig(loss_weight=WEIGHT))
    objective = WithMultiToken(SFT(), WEIGHT)
    whole = build_part(config, request=request_of(objective))
    stages = build.build_stages(whole, mesh, r.pipeline, r.parallelizer, num_microbatches=count)
    for part in stages.parts:
        assert isinstance(part, ModelPart)
        load_weights(part, config, device="cpu", seed=0)
    recorder = Recorder(*stages.parts)
    mine = every[mesh.dp_rank * count :][:count]
    result = train_step(stages, mine, objective, recorder, mesh, max_grad_norm=None)
    everywhere: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, gradient_errors(want.gradients, recorder.gradients))
    everywhere.append(missing(want.gradients, {name for of_rank in everywhere for name in of_rank}))
    name, gradient = worst_of(everywhere)
    losses = [(result.loss.item(), want.loss), (result.metrics["mtp_loss"].item(), want.mtp_loss)]
    loss, mtp_loss = (abs(got - right) / right for got, right in losses)
    return Outcome(loss, mtp_loss, gradient, name)


def check(folder: Path, made: multi_token.Made, rows: Sequence[Row], ranks: int = 2) -> None:
    want = multi_token.by_hand(made, step_batches(packed=True), WEIGHT)
    outcomes = launch(run, ranks, str(folder), want, rows, timeout=60 + 30 * len(rows))
    for r, outcome in zip(rows, outcomes, strict=True):
        print(r, outcome)
    wrong = [f"{r}: {o}" for r, o in zip(rows, outcomes, strict=True) if not o.worst < _tolerance(r)]
    assert not wrong, "\n".join(wrong)


def _tolerance(r: Row) -> float:
    return OF_PARTIAL_SUMS if (r.mesh.tp_size or 1) > 1 else TOLERANCE


def test_same_numbers_as_the_definition(tmp_path: Path):
    rows = [
        row(dp=2),
        row(dp=2, ep=2, recompute=True),
        row(cp=2, recompute=True),
        row(tp=2),
        replace(row(dp=2), parallelizer=DDPConfig()),
    ]
    check(tmp_path, multi_token.write(tmp_path, depths=2), rows)
