"""Objectives that read values or teachers, on ranks and in stages, against the library's model in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.layout import MeshConfig
from automodel_cli.objectives.reward import BradleyTerry
from automodel_cli.parity.compare import Errors, run_rows
from automodel_cli.parity.reference import Original
from automodel_cli.parity.rows import FP32, Row
from automodel_cli.pipelining.config import PipelineConfig
from tests import tiny
from tests.dist.harness import launch

TOLERANCE = 1e-6
OBJECTIVES = {"reward model": BradleyTerry(margin=True, center=0.1)}


def layouts(objective: Any) -> dict[str, Row]:
    """Each of two ranks."""
    fsdp2, stages = FSDP2Config(mp_policy=FP32), PipelineConfig(schedule="1f1b")
    return {
        "fsdp2": Row(MeshConfig(dp_size=2), fsdp2, objective=objective),
        "pp": Row(MeshConfig(dp_size=1, pp_size=2), fsdp2, stages, objective=objective),
        "cp": Row(MeshConfig(dp_size=1, cp_size=2), fsdp2, objective=objective),
    }


@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_algorithm_has_the_numbers_of_one_process_on_ranks_and_in_stages(name: str, tmp_path: Path):
    objective = OBJECTIVES[name]
    original = Original.write(tmp_path, tiny.build_hf("llama"), objective, kinds=(True,))
    rows = layouts(objective)
    for layout, errors in zip(rows, launch(run_rows, 2, original, list(rows.values())), strict=True):
        assert isinstance(errors, Errors) and errors.within(TOLERANCE), (layout, errors)
