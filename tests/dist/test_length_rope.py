"""Length-dependent rotary tables on several ranks, as a run builds them: every document of a packed or padded row gets
the table that it gets alone, also where no rank holds it whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.cases import FP32, Case
from automodel_cli.parity.compare import Errors, run_rows
from automodel_cli.parity.reference import Original
from automodel_cli.pipelining.config import PipelineConfig
from tests.dist.harness import launch
from tests.unit.models.document_masking.test_dynamic_rope import case_model

pytestmark = pytest.mark.slow

FSDP2 = FSDP2Config(mp_policy=FP32)
SHARED, SPLIT = MeshConfig(dp_size=1, cp_size=2), MeshConfig(dp_size=1, pp_size=2)
RECOMPUTED = replace(FSDP2, activation_checkpointing=True)
ROWS = {
    "phi3": [Case(SHARED, RECOMPUTED), Case(SPLIT, RECOMPUTED, PipelineConfig(schedule="interleaved_1f1b"))],
    "dynamic": [Case(SHARED, replace(FSDP2, context_parallel="ring")), Case(SHARED, FSDP2, packed=False)],
}
ROWS = {name: [replace(row, num_microbatches=4) for row in rows] for name, rows in ROWS.items()}


@pytest.mark.parametrize("name", ROWS)
def test_documents_get_their_own_tables_on_two_ranks(name: str, tmp_path: Path):
    original = Original.write(tmp_path / "model", case_model(name).train(), SFT(), counts=(4,))
    for row, outcome in zip(ROWS[name], launch(run_rows, 2, original, ROWS[name]), strict=True):
        assert isinstance(outcome, Errors) and outcome.within_rounding(), f"{row}: {outcome}"


@pytest.mark.parametrize("name", ["phi3", "dynamic"])
def test_documents_get_their_own_tables_on_stages_that_share_rows(name: str, tmp_path: Path):
    original = Original.write(tmp_path / "model", case_model(name).train(), SFT(), kinds=(True,), counts=(4,))
    mesh = MeshConfig(dp_size=1, cp_size=2, pp_size=2)
    wanted = [Case(mesh, FSDP2, PipelineConfig(schedule="zbv"), num_microbatches=4)]
    (outcome,) = launch(run_rows, 4, original, wanted)
    assert isinstance(outcome, Errors) and outcome.within_rounding(), outcome
