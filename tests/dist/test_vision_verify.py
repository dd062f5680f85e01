"""`automodel verify` of runs with pictures: its cases against the unmodified composite."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.dryrun.types import TraceRequest
from automodel_cli.dryrun.worker import load
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.parity.cases import Case
from automodel_cli.parity.pictures import PictureOriginal, run_picture_rows
from automodel_cli.pipelining.config import PipelineConfig
from tests.dist.harness import launch
from tests.marks import slow

PACKED = [
    Case(MeshConfig(dp_size=2)),
    Case(MeshConfig(pp_size=2), pipeline=PipelineConfig()),
    Case(MeshConfig(tp_size=2), lora=LoRAConfig(rank=4)),
]


@pytest.mark.slow
@pytest.mark.parametrize("conf", ["qwen3_vl_8b_tiny", *slow("qwen3_vl_30b_pp2ep4_tiny")])
def test_layouts_equal_one_process_and_another_step_does_not(conf: str, tmp_path: Path) -> None:
    """Ranks without pictures among them. The rows of one document are compared with the step of packed rows."""
    recipe: Any = load(TraceRequest(conf, (), 8))
    original = PictureOriginal.write(tmp_path / "copy", recipe.model, 4, recipe.objective, [True])
    shutil.copy(original.path(packed=True), original.path(packed=False))
    wrong = Case(MeshConfig(dp_size=2), packed=False)
    *found, other = launch(run_picture_rows, 2, original, [*PACKED, wrong])
    for case, errors in zip(PACKED, found, strict=True):
        assert errors.within_rounding(), (case, errors)
    assert other.worst > 1e-2
