"""Layers for multi-token prediction under every parallelism, against their definition in one process, in float64.

Loss, the loss of the further tokens, and every gradient of a real optimizer step over packed rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch.distributed as dist

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.config import DDPConfig
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.mtp_config import MTPConfig
from automodel_cli.objectives.base import request_of
from automodel_cli.objectives.mtp import WithMultiToken
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.batches import step_batches
from automodel_cli.parity.cases import Case
from automodel_cli.parity.compare import GradientRecorder
from automodel_cli.parity.gradient_errors import gradient_errors, missing, worst_of
from automodel_cli.pipelining import build_stages
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.pipelining.cut.split_check import check_split
from automodel_cli.pipelining.cut.stage_plan import plan_stages
from automodel_cli.pipelining.torch_runtime import gradient_sync
from automodel_cli.training.step import train_step
from tests import multi_token
from tests.dist.harness import launch
from tests.dist.test_composed import row
from tests.errors import raises
from tests.marks import nightly
from tests.multi_token import ByHand
from tests.rounding import tolerance

pytestmark = pytest.mark.slow

# Of single gradients: the definition is in float64, and one process in float32 is off by 7e-7; the sums that tensor
# parallelism makes in parts by 1.5e-6. Mistakes cost 1e-3 and more.
WEIGHT = 0.3


@dataclass
class Outcome:
    loss: float
    mtp_loss: float
    gradient: float
    name: str

    @property
    def is_right(self) -> bool:
        return max(self.loss, self.mtp_loss) < tolerance() and self.gradient < tolerance()


def run(
    rank: int, world: int, folder: str, wanted: dict[int, ByHand], rows: Sequence[Case], sums: bool = True
) -> list[Outcome]:
    """A step of every row, whose worst errors over ranks rank 0 returns; `wanted` by count of microbatches. `sums`
    False is a mistake: the stages' copies of the embedding keep the gradients of their own use of it."""
    if not sums:
        gradient_sync.sum_tied = lambda *_: None
    return [_run(folder, wanted[r.num_microbatches], r) for r in rows]


def _run(folder: str, want: ByHand, r: Case) -> Outcome:
    mesh = build_mesh(r.mesh.resolve(dist.get_world_size()), "cpu")
    every = step_batches(packed=True, count=r.num_microbatches)
    count = len(every) // mesh.dp_size
    config = ModelConfig(pretrained=folder, mtp=MTPConfig(loss_weight=WEIGHT))
    objective = WithMultiToken(SFT(), WEIGHT)
    whole = build_part(config, request=request_of(objective))
    stages = build_stages.build_stages(whole, mesh, r.pipeline, r.parallelizer, num_microbatches=count)
    for part in stages.parts:
        assert isinstance(part, ModelPart)
        load_weights(part, config, device="cpu", seed=0)
    recorder = GradientRecorder(*stages.parts)
    mine = every[mesh.dp_rank * count :][:count]
    result = train_step(stages, mine, objective, recorder, mesh, max_grad_norm=None)
    everywhere: list[dict[str, float]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, gradient_errors(want.gradients, recorder.gradients))
    everywhere.append(missing(want.gradients, {name for of_rank in everywhere for name in of_rank}))
    name, gradient = worst_of(everywhere)
    losses = [(result.loss.item(), want.loss), (result.metrics["mtp_loss"].item(), want.mtp_loss)]
    loss, mtp_loss = (abs(got - right) / right for got, right in losses)
    return Outcome(loss, mtp_loss, gradient, name)


def by_count(made: multi_token.Made, rows: Sequence[Case]) -> dict[int, ByHand]:
    counts = {r.num_microbatches for r in rows}
    return {count: multi_token.by_hand(made, step_batches(packed=True, count=count), WEIGHT) for count in counts}


def check(folder: Path, made: multi_token.Made, rows: Sequence[Case], ranks: int = 2) -> None:
    outcomes = launch(run, ranks, str(folder), by_count(made, rows), rows, timeout=60 + 30 * len(rows))
    for r, outcome in zip(rows, outcomes, strict=True):
        print(r, outcome)
    wrong = [f"{r}: {o}" for r, o in zip(rows, outcomes, strict=True) if not o.is_right]
    assert not wrong, "\n".join(wrong)


@pytest.mark.nightly
def test_same_numbers_as_the_definition(tmp_path: Path):
    rows = [
        row(dp=2),
        row(dp=2, ep=2, recompute=True),
        row(cp=2, recompute=True),
        row(tp=2),
        replace(row(dp=2), parallelizer=DDPConfig()),
    ]
    check(tmp_path, multi_token.write(tmp_path, depths=2), rows)


def cut(layout: str | None, schedule: str, pp: int, **more) -> Case:
    return replace(row(pp=pp, **more), pipeline=PipelineConfig(schedule=schedule, layout=layout))


def test_same_numbers_where_they_are_with_the_head_of_a_pipeline(tmp_path: Path):
    rows = [
        cut(None, "1f1b", 2, recompute=True),
        cut("Et|tt|t|mmL", "interleaved_1f1b", 2),
    ]
    check(tmp_path / "two", multi_token.write(tmp_path / "two", depths=2), rows)
    check(tmp_path / "one", multi_token.write(tmp_path / "one"), [cut(None, "zbv", 2)])


@pytest.mark.parametrize("tied", [*nightly(False), True])
def test_same_numbers_where_they_are_a_stage_of_their_own(tmp_path: Path, tied: bool):
    """Three ranks have the table of a tied model: it embeds on two and is the head on the third."""
    made = multi_token.write(tmp_path, "qwen3", depths=2, tie_word_embeddings=tied)
    check(tmp_path, made, [cut("Ett|ttmm|L", "1f1b", 3), cut("Et|t|t|t|mm|L", "interleaved_1f1b", 3)], ranks=3)


def test_copies_of_the_embedding_that_keep_their_own_gradient_show(tmp_path: Path):
    made = multi_token.write(tmp_path, "qwen3")
    rows = [cut(None, "1f1b", 2)]
    (outcome,) = launch(run, 2, str(tmp_path), by_count(made, rows), rows, False, timeout=90)
    assert outcome.gradient > 1e-3 and outcome.name == "model.embed_tokens.weight"


@pytest.mark.nightly
def test_same_numbers_on_four_ranks(tmp_path: Path):
    rows = [
        cut(None, "1f1b", 2, dp=2, ep=2, recompute=True),
        cut(None, "interleaved_1f1b", 2, cp=2),
        cut(None, "1f1b", 2, tp=2),
        cut("Et|tt|tm|L", "1f1b", 4),
        row(dp=2, cp=2, ep=2),
        row(dp=4, hsdp=2),
    ]
    check(tmp_path, multi_token.write(tmp_path), rows, ranks=4)


def test_a_split_backward_is_refused_where_the_embedding_is_used_twice(tmp_path: Path):
    multi_token.write(tmp_path, depths=2)
    part = build_part(ModelConfig(pretrained=str(tmp_path), mtp=MTPConfig()))
    with raises(ConfigError, "not_supported_by_model", keys=("schedule", "schedule_csv"), values=("zbv", 2)):
        plan_stages(PipelineConfig(schedule="zbv"), part, check_split(part.model), 2)
    with raises(ConfigError, "mtp-count", keys=("layout",), values=(0, 2)):
        plan_stages(PipelineConfig(layout="Ett|ttL"), part, check_split(part.model), 2)
