"""Stages of one rank after they were planned."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from automodel_cli.config.parameter_patterns import Selection
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.freezing import freeze
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.pipelining.cut.cut_stage import cut_stage
from automodel_cli.pipelining.cut.split_check import check_split
from automodel_cli.pipelining.cut.stage_plan import plan_stages
from automodel_cli.pipelining.stage_builder import LocalStages
from automodel_cli.training.optimizers.nodes import AdamW, Muon
from tests.tiny import tiny_fields


def test_a_stage_that_was_frozen_when_it_was_planned_cannot_be_trained():
    part = build_part(ModelConfig(config=tiny_fields("llama", num_hidden_layers=4, tie_word_embeddings=False)))
    freeze(part, Selection((), ("layers.3",)))
    anatomy = check_split(part.model)
    plan = plan_stages(PipelineConfig(layout="Et|t|t|tL", schedule="interleaved_1f1b"), part, anatomy, 2)
    cut = [
        cut_stage(part, anatomy, layers=layers, is_first=s == 0, is_last=s == 3) for s, layers in enumerate(plan.layers)
    ]
    first, second = (LocalStages(plan, [cut[s] for s in plan.of_rank(rank)], [], set()) for rank in (0, 1))
    for rank, stages in enumerate((first, second)):
        stages.check_frozen(rank)
    cut[3].requires_grad_(True)
    second.check_frozen(1)
    cut[2].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"layers\.2\..* is trained, but stage 2 "):
        first.check_frozen(0)


@pytest.mark.parametrize("build", [AdamW(lr=1e-3).build, Muon(lr=1e-3).build])
def test_a_stage_without_parameters_is_allocated_and_has_an_optimizer(build: Callable[..., torch.optim.Optimizer]):
    config = ModelConfig(config=tiny_fields("llama", num_hidden_layers=2), dtype="bfloat16")
    part = build_part(config)
    stage = cut_stage(part, check_split(part.model), layers=range(2, 2), is_first=False, is_last=False)
    assert not list(stage.parameters()) and stage.dtype == torch.bfloat16
    load_weights(stage, config, device="cpu", seed=0)
    assert {buffer.device.type for buffer in stage.buffers()} == {"cpu"}
    build([stage]).step()
