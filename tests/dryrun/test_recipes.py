"""Every bundled recipe at real size or width: memory against `plan`, and of most of them bounds of what a microbatch
waits for and launches.

The bounds are what was measured, so that one more kernel or wait in each layer fails. Who needs fewer lowers them; who
needs more says in the commit why. With `layers`, the model has only so many, of the real width.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from automodel_cli.config.composition import bundled_recipes
from automodel_cli.dryrun.estimate import estimate
from automodel_cli.dryrun.types import GIB, RankResult, TraceRequest
from automodel_cli.dryrun.worker import load
from automodel_cli.models.hub import bundled_configs
from automodel_cli.planning.plan import make_plan
from automodel_cli.run.memory.auto_activation_checkpointing import decided
from automodel_cli.run.plan_request import plan_request
from tests.dryrun.traces import trace_in_fork
from tests.marks import nightly

pytestmark = pytest.mark.slow

_BYTES = "model.tokenizer={_target_: automodel_cli.models.tokenizer.ByteTokenizer}"


_ELSEWHERE = ("rollout.engine.servers=null", "rollout.engine.url=http://localhost:8000")
"""Servers that the run starts need the name of a model."""


_ONCE_A_STEP = ("parallelizer.defer_fsdp_grad_sync=true",)
"""With two layers, what is outside of them is most of the model, and the plan adds its gradients to the head's."""


_ROWS = ("data.path=rows.jsonl",)
"""Of the user. Nothing reads it."""
_DDP = ("parallelizer=ddp", "parallelizer.activation_checkpointing=false")


@dataclass(frozen=True)
class Case:
    """A rank of a recipe. `waits` of the host and `kernels` are bounds for `microbatches` of them together; without
    them only memory is looked at. `microbatches` None: as many as it takes."""

    recipe: str
    gpus: int
    rank: int
    waits: int | None = None
    kernels: int | None = None
    microbatches: int | None = 2
    layers: int | None = None
    more: tuple[str, ...] = ()

    def __str__(self) -> str:
        frozen = "-frozen" if any("train.freeze" in override for override in self.more) else ""
        return f"{self.recipe}-{self.rank}-{self.layers or 'all'}{frozen}-{self.gpus}"


DEFAULT = [
    Case("qwen3_moe_30b_ep8", 8, 0, waits=5, kernels=670, layers=2, more=_ONCE_A_STEP),
    Case("gpt_oss_pp2ep4", 8, 4, waits=9, kernels=1602, microbatches=4, layers=4),
    Case("llama3_2_1b", 4, 0, waits=1, kernels=635, layers=2, more=_DDP),
]
SLOW = [
    Case("llama3_2_1b", 1, 0, waits=1, kernels=2440),
    Case("grpo_moonlight_16b_pp2ep4", 8, 4, waits=27, kernels=4326),
    Case("grpo_qwen3_moe_30b_separate", 16, 0, waits=5, kernels=1264, layers=2, more=_ELSEWHERE),
    Case("gpt_oss_pp2ep4", 8, 4, waits=89, kernels=11784, microbatches=8),
    Case("dpo_llama3_8b_pp2", 8, 4, waits=1, kernels=6671, microbatches=8),
]
NIGHTLY = [
    Case("moonlight_16b_pp2ep4", 8, 0, waits=113, kernels=14269, microbatches=8),
    Case("gpt_oss_pp2ep4", 8, 0, waits=105, kernels=13042, microbatches=8),
    Case("dpo_llama3_8b_pp2", 8, 0, waits=1, kernels=6060, microbatches=8),
]
PLANNED = [
    Case("grpo_gsm8k_qwen3_0_6b", 1, 0),
    Case("llama3_8b_tp2cp2", 8, 0),
    Case("qwen3_vl_8b", 8, 0, more=_ROWS),
    Case("qwen3_vl_8b_lora", 1, 0, more=_ROWS),
    Case("deepseek_v3_pp16_ep64", 1024, 0, microbatches=None),
    Case("gpt_oss_pp2ep4_seqpack", 8, 4, microbatches=None),
    Case("grpo_qwen3_moe_30b_colocated", 32, 0),
    Case("grpo_smollm2_tools", 1, 0),
    Case("qwen3_0_6b", 1, 0),
    Case("qwen3_vl_30b_pp2ep4", 8, 0, microbatches=None, more=_ROWS),
    Case("smollm2_135m", 1, 0),
]
FROZEN = [
    Case("llama3_2_1b", 1, 0, more=("train.freeze=[model.embed_tokens.*,'model.layers.?.*']",)),
    Case("llama3_2_1b", 4, 0, more=("train.freeze=[model.embed_tokens.*,'model.layers.?.*']",)),
    Case("qwen3_moe_30b_ep8", 8, 0, layers=4, more=(*_ONCE_A_STEP, "train.freeze=['*experts*']")),
]
"""The embedding and 10 of 16 layers, or all experts."""
COMPARED = [*DEFAULT, *SLOW, FROZEN[-1]]
EVERY = [*DEFAULT, *SLOW, *NIGHTLY, *PLANNED]
_NOT_OF_REAL_SIZE = re.compile(
    r"quickstart.*|.*_tiny|sft|dpo|dpo_vlm|grpo|kd|rm|vlm|classifier|embedding|pretrain|gemma3_.*"
)
"""Toys, what recipes begin with, and Gemma 3, whose processor is not made from its config."""


@cache
def traced(case: Case) -> RankResult:
    return trace_in_fork(
        TraceRequest(case.recipe, _overrides(case), case.gpus, case.rank, microbatches=case.microbatches)
    )


def _overrides(case: Case) -> tuple[str, ...]:
    return (*(() if case.layers is None else _fewer_layers(case.recipe, case.layers)), *case.more)


def _fewer_layers(recipe: str, layers: int) -> tuple[str, ...]:
    given = load(TraceRequest(recipe, (), 1))
    name = given.model.pretrained
    with bundled_configs.preferred():
        fields = dict(bundled_configs.fields(name, None) or {})
    fields["num_hidden_layers"] = layers
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][:layers]
    evenly = () if given.pipeline is None or given.pipeline.layout is None else ("pipeline.layout=null",)
    return ("model.pretrained=null", f"model.config={_literal(fields)}", _BYTES, *evenly)


def _literal(value: Any) -> str:
    """In Hydra's grammar."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_literal(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_literal, value)) + "]"
    if isinstance(value, str):
        return f"'{value}'"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def test_every_bundled_recipe_of_real_size_is_dry_run() -> None:
    assert {case.recipe for case in EVERY} == {
        name for name in bundled_recipes.recipe_names() if not _NOT_OF_REAL_SIZE.fullmatch(name)
    }


@pytest.mark.parametrize("case", [*COMPARED, *nightly(*NIGHTLY, *PLANNED, *FROZEN[:-1])], ids=str)
def test_a_plan_is_within_ten_percent_of_the_peak_of_the_real_step(case: Case) -> None:
    found = traced(case)
    assert found.plan == pytest.approx(found.peak, rel=0.10)


@pytest.mark.parametrize("case", [*SLOW, *nightly(*NIGHTLY)], ids=str)
def test_the_step_time_of_a_plan_overlaps_that_of_its_dry_run(case: Case) -> None:
    """Both have the same formulas. A plan's counts are closed forms, within 20% for steps of the config's size."""
    request = TraceRequest(case.recipe, _overrides(case), case.gpus)
    found = estimate([traced(case)], request.device, case.gpus)
    with bundled_configs.preferred():
        recipe = load(request)
        layout = recipe.mesh.resolve(case.gpus)
        planned = make_plan(plan_request(decided(recipe, layout, request.device.memory_gib * GIB)[0], layout)).time
    assert planned.throughput.low < found.throughput.high
    assert found.throughput.low < planned.throughput.high


@pytest.mark.parametrize("case", [*DEFAULT, *SLOW, *nightly(*NIGHTLY)], ids=str)
def test_a_microbatch_waits_and_launches_no_more_than_it_did(case: Case) -> None:
    found = traced(case)
    assert case.waits is not None and case.kernels is not None
    assert found.measured_microbatches == case.microbatches
    assert found.num_syncs <= case.waits, found.syncs
    assert found.num_kernels <= case.kernels, found.kernels
