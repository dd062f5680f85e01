"""Every parallelism with every other, on 4 and 8 ranks, against the library's model in one process.

Rows are layout x family x packed or padded; each runs 4 microbatches a step, or 2 on each data-parallel rank, and
loss, gradient norm and every gradient must agree to 1e-6. A part runs before a merge (`-m slow`), the rest at night
(`-m nightly`). Then the mistakes that such compositions invite, which must not pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.cases import FP32, Case
from automodel_cli.parity.compare import Errors, run_rows
from automodel_cli.parity.reference import Original
from automodel_cli.pipelining.config import PipelineConfig
from tests import tiny
from tests.dist import mutations
from tests.dist.harness import launch

pytestmark = pytest.mark.slow

CLEARLY_WRONG = 1e-4
DENSE, MOE = ("llama", "qwen3"), ("qwen3_moe", "gpt_oss", "deepseek_v3")


def row(
    *, pp: int = 1, dp: int = 1, hsdp: int = 1, cp: int = 1, tp: int = 1, ep: int = 1, sp: bool = False, **more: object
) -> Case:
    """`more`: schedule, recompute, every_microbatch (gradients are summed over ranks on each)."""
    mesh = MeshConfig(dp_size=dp, dp_replicate_size=hsdp, tp_size=tp, pp_size=pp, cp_size=cp, ep_size=ep)
    parallelizer = FSDP2Config(
        mp_policy=FP32,
        sequence_parallel=sp,
        activation_checkpointing=bool(more.get("recompute")),
        defer_fsdp_grad_sync=not more.get("every_microbatch"),
    )
    pipeline = PipelineConfig(schedule=str(more.get("schedule", "1f1b"))) if pp > 1 else None
    return Case(mesh, parallelizer, pipeline, num_microbatches=max(4, 2 * dp))


# Layouts of any model, by ranks.
DENSE_ROWS = {
    4: [
        row(pp=2, dp=2, schedule="interleaved_1f1b"),
        row(pp=4, schedule="zb_h1"),
        row(dp=4, hsdp=2),
        row(tp=2, dp=2),
        row(tp=2, dp=2, sp=True),
        row(tp=2, pp=2, sp=True),
        row(cp=2, dp=2),
        row(cp=2, pp=2, schedule="zbv"),
        row(cp=2, tp=2),
        row(cp=4),
    ],
    8: [
        row(pp=2, dp=4, hsdp=2, recompute=True),
        row(pp=2, cp=2, tp=2),
        row(pp=2, tp=2, dp=2, sp=True, schedule="interleaved_1f1b"),
        row(pp=2, cp=2, dp=2),
        row(cp=2, tp=2, dp=2, sp=True),
        row(dp=4, hsdp=2, tp=2),
        row(dp=4, hsdp=2, cp=2),
    ],
}
# One of each pair of axes, packed and padded in turns.
PAIRS = [replace(DENSE_ROWS[4][i], packed=i % 2 == 0) for i in (0, 4, 5, 6, 7, 8)]
# Layouts with experts over ranks.
MOE_ROWS = {
    4: [
        row(dp=4, ep=2),
        row(dp=4, ep=4, recompute=True),
        row(pp=2, dp=2, ep=2, schedule="interleaved_1f1b"),
        row(pp=2, dp=2, ep=2, schedule="interleaved_1f1b", every_microbatch=True),
        row(cp=2, dp=2, ep=2),
        row(tp=2, dp=2, ep=2),
    ],
    8: [
        row(pp=2, dp=4, ep=4),
        row(pp=2, dp=2, cp=2, ep=4, schedule="interleaved_1f1b"),
        row(pp=2, dp=2, cp=2, ep=2, recompute=True),
        row(pp=2, tp=2, dp=2, ep=2),
        row(pp=2, cp=2, tp=2, ep=2),
        row(dp=4, hsdp=2, cp=2, ep=2),
        row(cp=2, tp=2, dp=2, ep=4),
    ],
}


@dataclass
class Originals:
    """The tiny models as checkpoints, each measured in one process when it is first asked for."""

    folder: Path

    def __getitem__(self, family: str) -> Original:
        folder = self.folder / family
        if not folder.exists():
            Original.write(folder, tiny.build_hf(family), SFT(), counts=(4, 8))
        return Original(folder)


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Originals:
    return Originals(tmp_path_factory.mktemp("originals"))


def rows_of(layouts: list[Case], family: str) -> list[Case]:
    """Packed and padded in turns, over rows and families."""
    shift = [*DENSE, *MOE].index(family)
    return [replace(r, packed=(i + shift) % 2 == 0) for i, r in enumerate(layouts)]


def check(original: Original, rows: list[Case]) -> None:
    """All rows in one set of ranks."""
    outcomes = launch(run_rows, rows[0].world_size, original, rows, timeout=60 + 30 * len(rows))
    wrong = [
        f"{r}: {outcome}"
        for r, outcome in zip(rows, outcomes, strict=True)
        if not isinstance(outcome, Errors) or not outcome.within_rounding()
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.nightly
def test_pairs_of_axes_on_four_ranks(originals: Originals):
    """The matrices below have all families, and both kinds of rows in each layout."""
    check(originals["llama"], PAIRS)


def test_four_axes_on_eight_ranks(originals: Originals):
    check(originals["gpt_oss"], [MOE_ROWS[8][1]])


@pytest.mark.nightly
@pytest.mark.parametrize("world", [4, 8])
@pytest.mark.parametrize("family", DENSE)
def test_dense_matrix(originals: Originals, family: str, world: int):
    others = [r for r in rows_of(DENSE_ROWS[world], family) if family != "llama" or r not in PAIRS]
    check(originals[family], others)


@pytest.mark.nightly
@pytest.mark.parametrize("world", [4, 8])
@pytest.mark.parametrize("family", MOE)
def test_expert_matrix(originals: Originals, family: str, world: int):
    check(originals[family], rows_of(MOE_ROWS[world], family))


@pytest.mark.nightly
@pytest.mark.parametrize("family", MOE)
def test_experts_that_are_whole_on_every_rank(originals: Originals, family: str):
    check(originals[family], DENSE_ROWS[4][MOE.index(family) % 2 :: 2])


MUTATIONS: list[tuple[Callable, str, Case]] = [
    (mutations.average_instead_of_sum, "llama", row(pp=2, dp=2)),
    (mutations.norm_without_stages, "llama", row(pp=2)),
    (mutations.document_mask_dropped, "llama", row(pp=2)),
    (mutations.expert_gradients_over_ep, "qwen3_moe", row(dp=4, ep=2)),
    (mutations.labels_shifted_after_sharding, "llama", row(cp=2)),
    (mutations.context_gathered_in_rank_order, "llama", row(cp=2)),
    (mutations.head_norms_not_summed, "qwen3", row(tp=2)),
]


# By default the one that no other file has: sums and documents are in test_parity, experts in test_expert_parallel,
# labels and order of keys in test_context_parallel, norms of heads in test_tensor_parallel.
@pytest.mark.parametrize(
    ("mutation", "family", "layout"),
    [m if m[0] is mutations.norm_without_stages else pytest.param(*m, marks=pytest.mark.nightly) for m in MUTATIONS],
    ids=[m.__name__ for m, _, _ in MUTATIONS],
)
def test_mutation_is_noticed(originals: Originals, mutation: Callable, family: str, layout: Case):
    (outcome,) = launch(run_rows, layout.world_size, originals[family], [layout], mutation)
    assert isinstance(outcome, Errors) and outcome.worst > CLEARLY_WRONG, f"blind to it: {outcome}"
