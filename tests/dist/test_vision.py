"""Layouts of runs with pictures against one process: loss, gradient norm and every gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from automodel_cli.distributed.config import DDPConfig, FSDP2Config
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.parity.cases import FP32
from automodel_cli.pipelining.config import PipelineConfig
from tests.dist import vision_pair_cases
from tests.dist.harness import launch
from tests.dist.vision_cases import Case, compare, decomposition_error
from tests.vision import repository

SP = FSDP2Config(mp_policy=FP32, sequence_parallel=True)
RECOMPUTED = FSDP2Config(mp_policy=FP32, activation_checkpointing="full")
TWO = {
    "fsdp2": Case(),
    "recomputed": Case(parallelizer=RECOMPUTED),
    "ddp": Case(parallelizer=DDPConfig(find_unused_parameters=True)),
    "tp": Case(MeshConfig(tp_size=2)),
    "tp sp": Case(MeshConfig(tp_size=2), SP),
    "cp": Case(MeshConfig(cp_size=2)),
    "cp ring": Case(MeshConfig(cp_size=2), FSDP2Config(mp_policy=FP32, context_parallel="ring")),
    "pp": Case(MeshConfig(pp_size=2), pipeline=PipelineConfig()),
    "pp zb_h1": Case(MeshConfig(pp_size=2), pipeline=PipelineConfig(schedule="zb_h1")),
    "ep": Case(MeshConfig(ep_size=2)),
}
FOUR = {
    "pp tp": Case(MeshConfig(pp_size=2, tp_size=2), SP, PipelineConfig(layout="Et*3|L")),
    "pp dp": Case(MeshConfig(pp_size=2, dp_size=2), pipeline=PipelineConfig()),
    "pp ddp": Case(
        MeshConfig(pp_size=2, dp_size=2), DDPConfig(find_unused_parameters=True), PipelineConfig(schedule="gpipe")
    ),
    "cp tp": Case(MeshConfig(cp_size=2, tp_size=2), SP),
    "cp dp": Case(MeshConfig(cp_size=2, dp_size=2)),
    "ep pp": Case(MeshConfig(ep_size=2, pp_size=2), pipeline=PipelineConfig()),
    "ep tp": Case(MeshConfig(ep_size=2, tp_size=2, dp_size=2)),
}


def _check(kind: str, world: int, cases: dict[str, Case]) -> None:
    for name, errors in zip(cases, launch(compare, world, kind, list(cases.values())), strict=True):
        assert errors.within_rounding(), (name, errors)


def test_tokens_and_layers_with_pictures_on_two_ranks():
    """Deepstack, positions on three axes, and a microbatch without pictures. The other families are slow."""
    _check("qwen3_vl", 2, {name: TWO[name] for name in ("tp sp", "cp", "pp")})


@pytest.mark.nightly
def test_gradients_reach_the_tower_through_stages_of_a_frozen_text_model():
    _check("llava", 2, {"pp": replace(TWO["pp"], text_is_frozen=True)})


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["qwen3_vl", "llava", "qwen3_vl_moe", "qwen2_5_vl", "glm4v_moe", "gemma3"])
@pytest.mark.parametrize(("world", "cases"), [(2, TWO), (4, FOUR)], ids=["two ranks", "four ranks"])
def test_all_layouts_give_the_numbers_of_one_process(kind: str, world: int, cases: dict[str, Case]):
    absent = [] if kind.endswith("moe") else ["ep"]
    _check(kind, world, {name: case for name, case in cases.items() if not any(axis in name for axis in absent)})


ADAPTERS = LoRAConfig(rank=4, alpha=8.0)


# In mixtures, `all-linear` of peft includes routers and experts, and ours does not. These names mean the same to both.
IN_MIXTURES = replace(
    ADAPTERS, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "qkv", "attn.proj", "merger.proj"]
)


def _with_adapters(kind: str, names: Sequence[str]) -> dict[str, Case]:
    lora = IN_MIXTURES if kind.endswith("moe") else ADAPTERS
    return {name: replace(TWO[name], lora=lora) for name in names}


@pytest.mark.slow
def test_adapters_on_tower_and_projector_have_the_gradients_of_peft():
    _check("qwen3_vl", 2, _with_adapters("qwen3_vl", ["pp"]))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("qwen3_vl", ["fsdp2", "recomputed", "ddp", "tp sp", "cp", "cp ring"]),
        ("llava", ["fsdp2", "recomputed", "ddp", "tp sp", "cp", "pp"]),
        ("glm4v_moe", ["fsdp2", "ep"]),
    ],
)
def test_adapters_on_tower_and_projector_under_all_layouts(kind: str, names: list[str]):
    _check(kind, 2, _with_adapters(kind, names))


def test_adapters_of_a_tower_start_at_its_decomposition_beside_stages_without_it(tmp_path: Path):
    repository("llava", tmp_path)
    assert launch(decomposition_error, 2, str(tmp_path)) < 1e-5


@pytest.mark.nightly
def test_eight_ranks():
    mesh = MeshConfig(dp_size=2, pp_size=2, tp_size=2)
    _check("llava", 8, {"dp pp tp": Case(mesh, SP, PipelineConfig())})


PAIRS = {"fsdp2": Case(), "tp sp": TWO["tp sp"], "pp": TWO["pp"]}


@pytest.mark.nightly
def test_pairs_with_pictures_and_a_reference_model_on_two_ranks():
    """A rank has a microbatch without pictures, and others show a picture in both responses and in several pairs."""
    for name, errors in zip(PAIRS, launch(vision_pair_cases.compare, 2, "qwen3_vl", list(PAIRS.values())), strict=True):
        assert errors.within_rounding(), (name, errors)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "shared"),
    [("qwen3_vl", True), ("llava", True), ("qwen3_vl_moe", True), ("qwen3_vl_moe", False), ("gemma3", False)],
    ids=lambda value: value if isinstance(value, str) else f"tower once a {'picture' if value else 'response'}",
)
def test_pairs_with_pictures_under_all_layouts(kind: str, shared: bool):
    absent = [] if kind.endswith("moe") else ["ep"]
    cases = {name: case for name, case in TWO.items() if not any(axis in name for axis in absent)}
    found = launch(partial(vision_pair_cases.compare, shared=shared), 2, kind, list(cases.values()))
    for name, errors in zip(cases, found, strict=True):
        assert errors.within_rounding(), (name, errors)
