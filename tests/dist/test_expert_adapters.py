"""Adapters on fused experts over ranks: loss, gradient norm and every gradient against one process, and the files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from automodel_cli.data.batch import Batch
from automodel_cli.distributed.config import DDPConfig, FSDP2Config
from automodel_cli.distributed.expert_parallel import low_rank
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.models import transformers_compat
from automodel_cli.models.lora import export as lora_export
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.rng import generator_for
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.cases import FP32, Case
from automodel_cli.parity.compare import TIMES_ROUNDING, Errors, build_parity_stages, run_rows
from automodel_cli.parity.reference import Original
from automodel_cli.pipelining.config import PipelineConfig
from tests import tiny
from tests.dist.harness import launch
from tests.marks import nightly

pytestmark = pytest.mark.slow

ADAPTERS = LoRAConfig(rank=4, alpha=12.0, target_modules=[], target_parameters="all-experts")
BOTH = LoRAConfig(rank=8, alpha=12.0, target_parameters="all-experts")
FSDP2 = FSDP2Config(mp_policy=FP32)
ROWS = {
    "one rank": Case(MeshConfig(dp_size=1), lora=ADAPTERS),
    "fsdp2": Case(MeshConfig(dp_size=2), lora=ADAPTERS),
    "ddp": Case(MeshConfig(dp_size=2), DDPConfig(), lora=BOTH),
    "ep2": Case(MeshConfig(dp_size=2, ep_size=2), lora=replace(BOTH, modules_to_save=["lm_head", "norm"])),
    "tp2": Case(MeshConfig(dp_size=1, tp_size=2), lora=ADAPTERS),
    "tp2 ep2": Case(MeshConfig(dp_size=1, tp_size=2, ep_size=2), lora=ADAPTERS),
    "pp2": Case(MeshConfig(dp_size=1, pp_size=2), pipeline=PipelineConfig(schedule="1f1b"), lora=ADAPTERS),
    "cp2": Case(MeshConfig(dp_size=1, cp_size=2), lora=ADAPTERS),
    "recompute": Case(
        MeshConfig(dp_size=2, ep_size=2), FSDP2Config(mp_policy=FP32, activation_checkpointing="full"), lora=ADAPTERS
    ),
}
OF_ONE, OF_FOUR = (
    ("one rank",),
    {
        "ep2 over 4": Case(MeshConfig(dp_size=4, ep_size=2), lora=BOTH),
        "pp2 ep2, split backward": Case(
            MeshConfig(dp_size=2, pp_size=2, ep_size=2), pipeline=PipelineConfig(schedule="zb_h1"), lora=ADAPTERS
        ),
    },
)


def _original(folder: Path, family: str) -> Original:
    return Original.write(folder / "model", tiny.build_hf(family, num_hidden_layers=2), SFT())


def _check(original: Original, world: int, rows: dict[str, Case]) -> None:
    outcomes = launch(run_rows, world, original, list(rows.values()))
    for (name, row), outcome in zip(rows.items(), outcomes, strict=True):
        assert isinstance(outcome, Errors), (name, outcome)
        assert outcome.within(*row.bounds(TIMES_ROUNDING * outcome.rounding)), (name, outcome)
        assert "lora_" in outcome.name or row.lora.modules_to_save


@pytest.mark.parametrize("family", ["qwen3_moe", *nightly("gpt_oss", "deepseek_v3")])
def test_every_layout_has_the_gradients_of_one_process(family: str, tmp_path: Path):
    original = _original(tmp_path, family)
    _check(original, 2, {name: row for name, row in ROWS.items() if name not in OF_ONE})


@pytest.mark.parametrize("family", ["qwen3_moe", *nightly("gpt_oss")])
def test_one_rank_and_four_ranks(family: str, tmp_path: Path):
    original = _original(tmp_path, family)
    _check(original, 1, {name: ROWS[name] for name in OF_ONE})
    _check(original, 4, OF_FOUR)


def _second_update_without_scale(batches: list[Batch]) -> list[Batch]:
    product = low_rank.inner_gradient
    low_rank.inner_gradient = lambda *arguments: 2 * product(*arguments)
    return batches


def test_a_wrong_gradient_is_noticed(tmp_path: Path):
    (outcome,) = launch(run_rows, 2, _original(tmp_path, "gpt_oss"), [ROWS["ep2"]], _second_update_without_scale)
    assert outcome.gradient > 1e-2


def _save(rank: int, world: int, original: Original, row: Case, folder: str) -> None:
    mesh = build_mesh(row.mesh.resolve(world), "cpu")
    stages = build_parity_stages(original, row, mesh)
    with torch.no_grad():
        for part in stages.parts:
            for name, param in part.named_parameters():
                if "lora_B" in name:
                    value = torch.randn(param.shape, generator=generator_for(0, name))
                    transformers_compat.local(param).copy_(transformers_compat.local_part(param, value))
    lora_export.save_adapters(stages.parts, row.lora, folder, base_model="x", write=rank == 0, pp_group=stages.pp_group)


@pytest.mark.parametrize("layout", ["ep2", "tp2", *nightly("pp2", "fsdp2")])
def test_the_files_do_not_depend_on_the_layout(layout: str, tmp_path: Path):
    original, row = _original(tmp_path, "qwen3_moe"), ROWS[layout]
    alone = Case(MeshConfig(dp_size=1), lora=row.lora)
    launch(_save, 1, original, alone, str(tmp_path / "alone"))
    launch(_save, 2, original, row, str(tmp_path / "ranks"))
    want, got = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("alone", "ranks"))
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
