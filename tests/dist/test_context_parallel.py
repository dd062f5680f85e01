"""Rows shared by context-parallel ranks against one eager process, one document at a time: loss, norm, every gradient,
and the log-probs of whole rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.mesh import Mesh, build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.parallelizer import parallelize
from automodel_cli.models.attention import kernel_selection
from automodel_cli.models.attention.packed import register_packed_attention
from automodel_cli.models.context_parallel_layout import Context
from automodel_cli.models.lm_head.detection import detect_head
from automodel_cli.models.model_part import ModelPart
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.cases import FP32
from automodel_cli.parity.compare import Errors, GradientRecorder, step_errors
from automodel_cli.parity.reference import Reference, exact_process
from automodel_cli.pipelining.build_stages import build_stages
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.training.stages import SingleStage, Stages
from automodel_cli.training.step import train_step
from tests import tiny
from tests.dist.harness import launch
from tests.dist.turns import in_turns
from tests.marks import nightly

FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "qwen3_moe", "gpt_oss", "deepseek_v3")
ROWS = (  # document lengths of the two rows of each microbatch: no length divides, one is shorter than 2 * cp
    ((5, 9, 8), (15, 7)),
    ((31,), (6, 25)),
    ((2, 3), (5,)),
    ((13, 1, 2, 9), (25,)),
)


@dataclass(frozen=True)
class Case:
    family: str = "llama"
    packed: bool = True
    mesh: MeshConfig = field(default_factory=lambda: MeshConfig(dp_size=1, cp_size=2))
    recompute: bool = False
    ring: bool = False
    pipeline: PipelineConfig | None = None
    kernel: str = "auto"

    @property
    def num_layers(self) -> int:
        """A window and the whole document; four stages have a layer each."""
        return 2 if self.pipeline is None else tiny.NUM_LAYERS

    @property
    def of_reference(self) -> tuple[str, bool, int]:
        """What the numbers of one process depend on."""
        return self.family, self.packed, self.num_layers

    @property
    def parallelizer(self) -> FSDP2Config:
        how = "ring" if self.ring else "all_gather"
        return FSDP2Config(mp_policy=FP32, activation_checkpointing=self.recompute, context_parallel=how)


def make_batches(packed: bool) -> list[Batch]:
    """One step. Padded: the first document of each row is real and the rest is padding. One microbatch has no label."""
    batches = []
    for i, rows in enumerate(ROWS):
        batch = tiny.packed_batch(
            [[tiny.token_row(n, 100 * i + 10 * r + d) for d, n in enumerate(row)] for r, row in enumerate(rows)]
        )
        labels_BT = batch.labels_BT.clone()
        for row, lengths in enumerate(rows):
            labels_BT[row, : i % 2] = IGNORE_INDEX
            if not packed:
                labels_BT[row, lengths[0] :] = IGNORE_INDEX
        if i == 2:
            labels_BT[:] = IGNORE_INDEX
        batches.append(replace(batch, labels_BT=labels_BT, row_ids_B=torch.arange(2) + 2 * i))
    return batches


def make_stages(case: Case, mesh: Mesh, num_microbatches: int) -> Stages:
    register_packed_attention()
    model = tiny.build_hf(case.family, num_hidden_layers=case.num_layers)
    model.set_attn_implementation("packed")
    part = ModelPart(model, detect_head(tiny.tiny_config(case.family)), chunk_size=16)
    if case.pipeline is None:
        return SingleStage(parallelize(part, mesh, case.parallelizer))
    config = case.parallelizer
    return build_stages(part, mesh, case.pipeline, config, num_microbatches=num_microbatches)


@dataclass(frozen=True)
class Outcome:
    errors: Errors
    forward: float
    """Largest difference of a log-prob that evaluation returns."""


def run_cases(rank: int, world: int, cases: Sequence[Case], sabotage: str | None = None) -> list[Outcome]:
    wanted: dict[tuple[str, bool, int], tuple[Reference, list[Tensor]]] = {}
    for case in cases:
        if rank == 0 and case.of_reference not in wanted:
            wanted[case.of_reference] = in_one_process(case)
    if sabotage is not None:
        SABOTAGES[sabotage]()
    return [run_case(case, wanted.get(case.of_reference)) for case in cases]


def in_one_process(case: Case) -> tuple[Reference, list[Tensor]]:
    model, batches = tiny.build_hf(case.family, num_hidden_layers=case.num_layers), make_batches(case.packed)
    with torch.no_grad():
        logprobs = []
        for rows, batch in zip(ROWS, batches, strict=True):
            ids_N, labels_N = batch.input_ids_BT.flatten(), batch.labels_BT.flatten()
            lengths = [n for row in rows for n in row]
            parts = [
                tiny.reference_logprobs(model(input_ids=ids[None], use_cache=False).logits[0], labels)
                for ids, labels in zip(ids_N.split(lengths), labels_N.split(lengths), strict=True)
            ]
            logprobs.append(torch.cat(parts).view(batch.shape))
    return exact_process(model, batches, SFT()), logprobs


def run_case(case: Case, wanted: tuple[Reference, list[Tensor]] | None) -> Outcome:
    mesh = build_mesh(case.mesh.resolve(dist.get_world_size()), "cpu")
    kernel_selection.choose_kernel(case.kernel, mesh.device)
    every = make_batches(case.packed)
    mine = every[mesh.dp_rank :: mesh.dp_size]
    stages = make_stages(case, mesh, len(mine))
    values = stages.forward(mine, lambda output, batch: output.logprobs_BT.detach().clone())
    recorder = GradientRecorder(*stages.parts)
    result = train_step(stages, mine, SFT(), recorder, mesh, max_grad_norm=None)
    shared: list[Reference | None] = [None if wanted is None else wanted[0]]
    dist.broadcast_object_list(shared)
    assert shared[0] is not None
    errors = step_errors(shared[0], result, recorder.gradients)
    forward = 0.0
    if wanted is not None:  # rank 0
        for value, want in zip(values, wanted[1][mesh.dp_rank :: mesh.dp_size], strict=True):
            assert value.shape == want.shape
            forward = max(forward, (value - want).abs().max().item())
    return Outcome(errors, forward)


def check(world: int, cases: Sequence[Case]) -> None:
    outcomes = launch(run_cases, world, cases, timeout=300)
    failures = [
        f"{case}: {outcome}"
        for case, outcome in zip(cases, outcomes, strict=True)
        if not (outcome.errors.within_rounding() and outcome.forward < 5e-6)
    ]
    assert not failures, "\n".join(failures)


def mesh(cp: int, dp: int = 1, pp: int = 1, replicate: int = 1) -> MeshConfig:
    return MeshConfig(dp_size=dp, cp_size=cp, pp_size=pp, dp_replicate_size=replicate)


@pytest.mark.parametrize("ring", [False, True], ids=["all_gather", "ring"])
def test_two_ranks(ring: bool):
    """Windows, soft caps and sinks each way, latent attention gathered (four ranks below have it in a ring); the
    matrix has all families."""
    families = ("gemma2",) if ring else ("llama", "gemma2", "deepseek_v3")
    check(2, [*(Case(family, ring=ring) for family in families), Case("gpt_oss", packed=False, ring=ring)])


@pytest.mark.slow
def test_a_ring_of_four_ranks_with_recomputation():
    check(4, [Case("deepseek_v3", mesh=mesh(4), recompute=True, ring=True)])


@pytest.mark.nightly
def test_flex_attention_on_two_ranks_recomputed_gathered_in_a_ring_and_on_two_stages():
    """Soft caps, windows and sinks; gradients of all weights, so of the keys that other ranks held."""
    gemma = Case("gemma2", recompute=True, kernel="flex")
    stages = replace(gemma, mesh=mesh(1, pp=2), pipeline=PipelineConfig(schedule="1f1b"))
    check(2, [replace(gemma, ring=True), Case("gpt_oss", kernel="flex"), stages])


@pytest.mark.nightly
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_every_size_kind_and_recomputation(packed: bool, cp: int):
    rows = product((True, False), (True, False), FAMILIES)
    check(cp, in_turns([Case(family, packed, mesh(cp), again, ring) for again, ring, family in rows], cp, int(packed)))


@pytest.mark.slow
def test_with_data_parallel_ranks():
    check(4, [Case("qwen3", mesh=mesh(2, dp=2)), Case("gpt_oss", packed=False, mesh=mesh(2, dp=2))])


@pytest.mark.nightly
def test_with_hybrid_shards():
    check(8, [Case("llama", mesh=mesh(2, dp=4, replicate=2))])


UNDER_A_PIPELINE = [
    Case(family, mesh=mesh(2, pp=2), pipeline=PipelineConfig(schedule=schedule), recompute=recompute)
    for schedule, (family, recompute) in product(
        ("1f1b", "zb_h1", "zbv", "interleaved_1f1b"), (("gpt_oss", False), ("deepseek_v3", True))
    )
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "cases", [UNDER_A_PIPELINE[1:4:2], *nightly(UNDER_A_PIPELINE[5:6], UNDER_A_PIPELINE[:5:2], UNDER_A_PIPELINE[6:])]
)
def test_under_a_pipeline(cases: list[Case]):
    """Two schedules with recomputation (`test_composed` has zbv, without); then all the others."""
    check(4, cases)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zbv", "interleaved_1f1b"])
def test_a_ring_under_a_pipeline(schedule: str):
    """Two kinds of point-to-point traffic at a time, and backward passes in two halves."""
    pipeline = PipelineConfig(schedule=schedule)
    families = (("llama", True), ("gpt_oss", False), ("deepseek_v3", False))
    check(4, [Case(name, mesh=mesh(2, pp=2), ring=True, recompute=r, pipeline=pipeline) for name, r in families])


@pytest.mark.nightly
def test_pipeline_and_data_parallel_ranks_together():
    pipeline = PipelineConfig(schedule="1f1b")
    check(8, [Case(family, mesh=mesh(2, dp=2, pp=2), pipeline=pipeline) for family in ("qwen3_moe", "gpt_oss")])


def _drop_documents() -> None:
    padded_bounds = Context._padded_bounds

    def whole_rows(self: Context, cu_seqlens: Tensor | None) -> tuple[int, ...]:
        padded_bounds(self, cu_seqlens)
        return tuple(range(0, self.rows * self.tokens + 1, self.tokens))

    Context._padded_bounds = whole_rows  # type: ignore[method-assign]


def _contiguous_shares() -> None:
    """Tokens in order of rank, while attention believes in mirrored chunks."""
    local = Context.local

    def wrong(self: Context, x_BT: Tensor, fill: int) -> Tensor:
        size, rank = self.group.size, self.group.rank
        whole_BP = torch.nn.functional.pad(x_BT, (0, self.tokens - x_BT.shape[1]), value=fill)
        assert local(self, x_BT, fill).shape == whole_BP.chunk(size, 1)[rank].shape
        return whole_BP.chunk(size, 1)[rank]

    Context.local = wrong  # type: ignore[method-assign]


def _shift_after_cutting() -> None:
    local = Context.local

    def shifted(self: Context, x_BT: Tensor, fill: int) -> Tensor:
        own = local(self, x_BT, fill)
        if fill != IGNORE_INDEX:
            return own
        before_BT = torch.nn.functional.pad(x_BT[:, :-1], (1, 0), value=fill)  # as labels are before they are shifted
        return torch.nn.functional.pad(local(self, before_BT, fill)[:, 1:], (0, 1), value=fill)

    Context.local = shifted  # type: ignore[method-assign]


def _sum_results_twice() -> None:
    from automodel_cli.distributed.context_parallel import RankGroup

    RankGroup.gather_results = RankGroup.gather  # type: ignore[method-assign]


SABOTAGES: dict[str, Callable[[], None]] = {
    "documents": _drop_documents,
    "permutation": _contiguous_shares,
    "shift": _shift_after_cutting,
    "twice": _sum_results_twice,
}


@pytest.mark.parametrize("sabotage", ["permutation", "shift", *nightly("documents", "twice")])
def test_the_comparison_sees(sabotage: str):
    (outcome,) = launch(run_cases, 2, [Case()], sabotage)
    assert outcome.errors.gradient > 1e-3


def _refused(rank: int, world: int, attention: str) -> str:
    model = tiny.build_hf("llama")
    model.set_attn_implementation(attention)
    part = ModelPart(model, detect_head(model.config))
    with pytest.raises(ConfigError) as refusal:
        parallelize(part, build_mesh(mesh(2).resolve(world), "cpu"), Case().parallelizer)
    return str(refusal.value)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attention_that_would_not_see_other_ranks_is_refused(attention: str):
    message = launch(_refused, 2, attention)
    assert f"attn_implementation='{attention}'" in message and "model.attn_implementation=packed" in message
