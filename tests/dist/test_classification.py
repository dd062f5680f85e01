"""Classifiers on ranks and in stages: loss and every gradient of one process in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from automodel_cli.distributed.config import DDPConfig, FSDP2Config
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.objectives.classification import MultiLabel, Regression, SingleLabel
from automodel_cli.parity.cases import FP32, Case
from automodel_cli.parity.compare import Errors, run_rows
from automodel_cli.parity.reference import Original
from automodel_cli.pipelining.config import PipelineConfig
from tests import tiny
from tests.dist.harness import launch

pytestmark = pytest.mark.slow

NAMES = ["a", "b"]
OBJECTIVES = {
    "single label": SingleLabel(labels=NAMES, class_weights={"b": 3.0}),
    "multi label": MultiLabel(labels=NAMES, class_weights={"b": 0.5}),
    "regression": Regression(labels=NAMES),
    "tokens": SingleLabel(labels=NAMES, class_weights={"a": 2.0}, token_level=True),
}


def layouts(objective: Any) -> dict[str, Case]:
    """Each of two ranks."""
    fsdp2, lora = FSDP2Config(mp_policy=FP32), LoRAConfig(rank=4)
    rows = {
        "fsdp2": Case(MeshConfig(dp_size=2), fsdp2),
        "ddp": Case(MeshConfig(dp_size=2), DDPConfig()),
        "pp": Case(MeshConfig(dp_size=1, pp_size=2), fsdp2, PipelineConfig(schedule="1f1b")),
        "tp": Case(MeshConfig(dp_size=1, tp_size=2), fsdp2),
        "cp": Case(MeshConfig(dp_size=1, cp_size=2), fsdp2),
        "lora": Case(MeshConfig(dp_size=2), fsdp2, lora=lora),
        "lora pp": Case(MeshConfig(dp_size=1, pp_size=2), fsdp2, PipelineConfig(schedule="1f1b"), lora=lora),
    }
    return {name: replace(row, num_microbatches=4, objective=objective) for name, row in rows.items()}


@pytest.mark.parametrize("name", ["single label", "multi label", "regression", "tokens"])
def test_a_classifier_has_the_numbers_of_one_process_in_every_layout(name: str, tmp_path: Path):
    objective = OBJECTIVES[name]
    model = tiny.build_hf("llama", num_hidden_layers=2)
    original = Original.write(tmp_path, model, objective, kinds=(True,), counts=(4,))
    rows = layouts(objective)
    for layout, errors in zip(rows, launch(run_rows, 2, original, list(rows.values())), strict=True):
        assert isinstance(errors, Errors) and errors.within_rounding(), (layout, errors)


def test_a_classifier_on_experts_has_the_numbers_of_one_process(tmp_path: Path):
    objective = OBJECTIVES["single label"]
    original = Original.write(
        tmp_path, tiny.build_hf("qwen3_moe", num_hidden_layers=2), objective, kinds=(True,), counts=(4,)
    )
    experts = LoRAConfig(rank=4, target_parameters="all-experts")
    ep2 = Case(MeshConfig(dp_size=2, ep_size=2), FSDP2Config(mp_policy=FP32), num_microbatches=4, objective=objective)
    for errors in launch(run_rows, 2, original, [ep2, replace(ep2, lora=experts)]):
        assert isinstance(errors, Errors) and errors.within_rounding(), errors
