"""Frozen parameters under every layout against one process: the others have the same gradients, they have none."""

from __future__ import annotations

import pytest

from automodel_cli.config.parameter_patterns import Selection
from automodel_cli.data.batch import Batch
from automodel_cli.distributed.config import DDPConfig
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity import compare
from automodel_cli.parity.cases import Case
from automodel_cli.parity.compare import Errors, run_rows
from automodel_cli.parity.reference import Original
from automodel_cli.pipelining.config import PipelineConfig
from tests import tiny
from tests.dist.harness import launch

pytestmark = pytest.mark.slow

DP, PP = MeshConfig(dp_size=2), MeshConfig(dp_size=1, pp_size=2)
SOME = Selection(("layers.*.self_attn.q_proj", "mlp.down_proj", "norm"))
LOW, HIGH = Selection(("embed_tokens", "layers.[01]")), Selection((), ("embed_tokens", "layers.[01]"))
"""Of 4 layers: the complete first stage, and the complete last one."""
ROWS = [
    Case(DP, selection=SOME),
    Case(DP, DDPConfig(), selection=LOW),
    Case(MeshConfig(dp_size=1, tp_size=2), selection=SOME),
    Case(MeshConfig(dp_size=1, cp_size=2), selection=LOW),
    *(Case(PP, pipeline=PipelineConfig(schedule=s), selection=c) for s in ("1f1b", "zbv") for c in (LOW, HIGH)),
]
EXPERTS = [Case(MeshConfig(dp_size=2, ep_size=2), selection=Selection(("experts",)))]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    model = tiny.build_hf("llama", num_hidden_layers=4, tie_word_embeddings=False)
    return Original.write(tmp_path_factory.mktemp("original") / "model", model, SFT())


FAST = [ROWS[0], ROWS[4], ROWS[7]]


@pytest.mark.parametrize("rows", [FAST, [r for r in ROWS if r not in FAST]])
def test_layouts_train_what_one_process_trains(original: Original, rows: list[Case]):
    for row, outcome in zip(rows, launch(run_rows, 2, original, rows), strict=True):
        assert isinstance(outcome, Errors) and outcome.within_rounding(), (row, row.selection, outcome)


def _expects_one_more_frozen(batches: list[Batch]) -> list[Batch]:
    trained = compare._trained
    compare._trained = lambda original, row: trained(original, row) - {"lm_head.weight"}
    return batches


def test_a_gradient_of_a_frozen_parameter_is_noticed(original: Original):
    (outcome,) = launch(run_rows, 2, original, ROWS[:1], _expects_one_more_frozen)
    assert isinstance(outcome, Errors) and not outcome.within_rounding()


def test_frozen_experts_over_ranks(tmp_path):
    model = tiny.build_hf("qwen3_moe")
    source = Original.write(tmp_path / "model", model, SFT())
    (outcome,) = launch(run_rows, 2, source, EXPERTS)
    assert isinstance(outcome, Errors) and outcome.within_rounding()
