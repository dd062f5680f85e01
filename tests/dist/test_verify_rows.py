"""The rows of `automodel verify` for settings beyond the layout: adapters by closed form, lower precision by its units
in the last place, compiled layers, stages as described."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from automodel_cli.data.batch import Batch
from automodel_cli.distributed.config import DDPConfig, FSDP2Config
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.models.lora import merge as lora_merge
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.cases import FP32, Case
from automodel_cli.parity.compare import TIMES_ROUNDING, Errors, run_rows
from automodel_cli.parity.reference import Original
from automodel_cli.pipelining.config import PipelineConfig
from tests import tiny
from tests.dist.harness import launch

pytestmark = pytest.mark.slow

DP, PP = MeshConfig(dp_size=2), MeshConfig(dp_size=1, pp_size=2)
ADAPTERS = LoRAConfig(rank=4, alpha=12.0)
CHOSEN = LoRAConfig(
    rank=4, exclude_modules=["down_proj"], rank_pattern={"q_proj": 8}, modules_to_save=["lm_head", "norm"]
)
ROWS = [
    Case(DP, lora=ADAPTERS),
    Case(PP, pipeline=PipelineConfig(layout="Et|tL"), lora=LoRAConfig(rank=4, use_rslora=True)),
    Case(DP, FSDP2Config(), compute_dtype="bfloat16"),
    Case(DP, FSDP2Config(mp_policy=FP32, enable_compile=True, compile_backend="aot_eager")),
]
MORE = [
    Case(PP, pipeline=PipelineConfig(schedule="1f1b"), lora=CHOSEN),
    Case(DP, lora=CHOSEN),
    Case(DP, DDPConfig(), lora=CHOSEN),
    Case(MeshConfig(dp_size=1, tp_size=2), lora=CHOSEN),
    Case(MeshConfig(dp_size=1, cp_size=2), lora=CHOSEN),
]
DORA = LoRAConfig(rank=4, use_dora=True)
PISSA = LoRAConfig(rank=4, init_lora_weights="pissa")
OF_PISSA = [
    Case(DP, lora=PISSA),
    Case(MeshConfig(dp_size=1, tp_size=2), lora=replace(PISSA, init_lora_weights="olora")),
    Case(PP, pipeline=PipelineConfig(schedule="1f1b"), lora=PISSA),
    Case(DP, DDPConfig(), lora=replace(PISSA, init_lora_weights="orthogonal")),
    Case(MeshConfig(dp_size=1, cp_size=2), lora=PISSA),
]
TABLES = LoRAConfig(rank=4, alpha=6.0, target_modules=["q_proj", "embed_tokens", "lm_head"])
OF_TABLES = [
    Case(MeshConfig(dp_size=1, tp_size=2), lora=TABLES),
    Case(PP, pipeline=PipelineConfig(schedule="1f1b"), lora=TABLES),
    Case(DP, lora=TABLES),
    Case(DP, DDPConfig(), lora=TABLES),
    Case(MeshConfig(dp_size=1, cp_size=2), lora=TABLES),
    Case(MeshConfig(dp_size=1, tp_size=2), FSDP2Config(mp_policy=FP32, sequence_parallel=True), lora=TABLES),
]
TOKENS = LoRAConfig(rank=4, trainable_token_indices=[3, 9, 20])
OF_TABLES += [
    Case(MeshConfig(dp_size=1, tp_size=2), lora=TOKENS),
    Case(PP, pipeline=PipelineConfig(schedule="1f1b"), lora=TOKENS),
    Case(DP, lora=replace(TOKENS, modules_to_save=["lm_head"])),
    Case(DP, DDPConfig(), lora=TOKENS),
    Case(MeshConfig(dp_size=1, cp_size=2), lora=TOKENS),
    Case(MeshConfig(dp_size=1, tp_size=2), FSDP2Config(mp_policy=FP32, sequence_parallel=True), lora=TOKENS),
]
OF_DORA = [
    Case(MeshConfig(dp_size=1, tp_size=2), lora=DORA),
    Case(DP, lora=replace(DORA, target_modules=["q_proj", "down_proj", "lm_head"])),
    Case(PP, pipeline=PipelineConfig(schedule="zb_h1"), lora=DORA),
    Case(DP, DDPConfig(), lora=DORA),
    Case(MeshConfig(dp_size=1, cp_size=2), lora=DORA),
    Case(MeshConfig(dp_size=1, tp_size=2), FSDP2Config(mp_policy=FP32, sequence_parallel=True), lora=DORA),
    Case(DP, FSDP2Config(mp_policy=FP32, activation_checkpointing="full"), lora=DORA),
]
BESIDE_EXPERTS = [Case(MeshConfig(dp_size=2, ep_size=2), lora=adapters) for adapters in (DORA, PISSA, TABLES, TOKENS)]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    model = tiny.build_hf("llama", num_hidden_layers=2)
    return Original.write(tmp_path_factory.mktemp("original") / "model", model, SFT())


@pytest.mark.nightly
def test_adapters_precision_compilation_and_a_layout_give_one_process_numbers(original: Original):
    for row, outcome in zip(ROWS, launch(run_rows, 2, original, ROWS), strict=True):
        assert isinstance(outcome, Errors) and outcome.within(*row.bounds(TIMES_ROUNDING * outcome.rounding)), outcome
        if row.lora is not None:
            assert "lora_" in outcome.name


@pytest.mark.parametrize(
    "rows",
    [
        MORE[:1] + OF_DORA[:1] + OF_PISSA[:1] + OF_TABLES[:1],
        pytest.param(MORE[1:], marks=pytest.mark.nightly),
        pytest.param(OF_PISSA[1:], marks=pytest.mark.nightly),
        pytest.param(OF_TABLES[1:], marks=pytest.mark.nightly),
        pytest.param(OF_DORA[1:], marks=pytest.mark.nightly),
    ],
)
def test_chosen_layers_and_ranks_with_modules_trained_completely(original: Original, rows: list[Case]):
    for row, outcome in zip(rows, launch(run_rows, 2, original, rows), strict=True):
        assert isinstance(outcome, Errors) and outcome.within_rounding(), (row, outcome)


@pytest.mark.nightly
def test_adapters_beside_experts_over_ranks(tmp_path: Path):
    model = tiny.build_hf("qwen3_moe", num_hidden_layers=2)
    source = Original.write(tmp_path / "model", model, SFT())
    for row, outcome in zip(BESIDE_EXPERTS, launch(run_rows, 2, source, BESIDE_EXPERTS), strict=True):
        assert isinstance(outcome, Errors) and outcome.within_rounding(), (row.lora, outcome)


def _scale_of_adapters_lost(batches: list[Batch]) -> list[Batch]:
    lora_merge.scale = lambda layer: 1.0  # what the reference is told; the layers go on with theirs
    return batches


def _labels_of_another_token(batches: list[Batch]) -> list[Batch]:
    for batch in batches:
        batch.labels_BT[batch.labels_BT >= 0] = 5
    return batches


@pytest.mark.parametrize(
    ("row", "mistake"),
    [(0, _scale_of_adapters_lost), pytest.param(2, _labels_of_another_token, marks=pytest.mark.nightly)],
)
def test_a_mistake_is_not_within_the_bounds(original: Original, row: int, mistake):
    (outcome,) = launch(run_rows, 2, original, [ROWS[row]], mistake)
    assert isinstance(outcome, Errors) and not outcome.within(*ROWS[row].bounds(1e-5)), outcome


def test_a_reference_has_the_rounding_of_one_process(original: Original):
    assert 1e-8 < original.reference(packed=True).rounding < 1e-5
