"""Every schedule against one process: loss, gradient norm, forward-only values and every gradient, to 1e-6 relative."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.dist.harness import launch
from tests.dist.pipeline_cases import FAMILIES, KINDS, SCHEDULES, Case, run_cases, write_csv
from tests.dist.turns import in_turns
from tests.marks import nightly, slow
from tests.rounding import tolerance


def check(world: int, cases: list[Case]) -> None:
    errors = launch(run_cases, world, cases, timeout=60 + 20 * len(cases))
    wrong = [f"{case}: {error}" for case, error in zip(cases, errors, strict=True) if not error.worst <= tolerance()]
    assert not wrong, "\n".join(wrong)


def diagonal(shift: int) -> list[Case]:
    """Every schedule once, every family and every kind at least once."""
    return [
        Case(schedule, FAMILIES[(i + shift) % len(FAMILIES)], KINDS[(i + 2 * shift) % len(KINDS)])
        for i, schedule in enumerate(SCHEDULES)
    ]


def test_every_schedule_on_two_ranks():
    behind_the_embedding_alone = Case("1F1B", kind="empty")
    check(2, [*diagonal(0), behind_the_embedding_alone])


@pytest.mark.slow
def test_some_schedules_on_four_ranks():
    """Every third one; the matrix has all."""
    check(4, diagonal(3)[::3])


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, *nightly(4)])
@pytest.mark.parametrize("family", FAMILIES)
def test_whole_matrix(world: int, family: str):
    rows = [Case(s, family, k) for s, k in itertools.product(SCHEDULES, KINDS)]
    check(world, in_turns(rows, world, FAMILIES.index(family)))


def test_tied_table_on_every_placement():
    """Copies on two ranks (loop) and on one rank (V)."""
    check(2, [Case(schedule, "qwen3", "tied") for schedule in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")])


@pytest.mark.parametrize("schedules", [("ZB-H1", "ZBVZeroBubble"), *slow(("GPipe", "LoopedBFS"))], ids=" ".join)
def test_fewer_microbatches_than_stages(schedules: tuple[str, ...]):
    check(4, [Case(schedule, num_microbatches=3) for schedule in schedules])


@pytest.mark.slow
def test_grouped_interleaving_and_four_chunks():
    groups = [
        Case("Interleaved1F1B", options=(("microbatch_group_size", g),), num_microbatches=m)
        for g, m in [(2, 4), (3, 5), (4, 4)]
    ]
    chunks = [
        Case(s, options=(("layers_per_stage", 1),)) for s in ("LoopedBFS", "InterleavedZeroBubble", "Interleaved1F1B")
    ]
    check(2, [*groups, *(Case(c.schedule, "gpt_oss", "variable", options=c.options) for c in chunks)])


def test_program_from_csv(tmp_path: Path):
    """Another order than any class has: last stage's forwards of microbatches 0 and 1 swapped as well."""
    path = tmp_path / "program.csv"
    write_csv(path, "ZB-H1", 2, 4, 1)
    swapped = tmp_path / "swapped.csv"
    rows = ["0F1,0F0,0B1,0F2,0B0,0F3,0B2,0B3", "1F1,1B1,1F0,1B0,1F2,1B2,1F3,1B3"]
    swapped.write_text("\n".join(rows) + "\n")
    check(
        2,
        [
            Case("1F1B", "qwen3", "variable", options=(("pp_schedule_csv", str(p)),), num_microbatches=4)
            for p in (path, swapped)
        ],
    )


def test_explicit_modules_and_cost_balance():
    names = [
        ["model.embed_tokens", "model.layers.0"],
        [*(f"model.layers.{i}" for i in (1, 2, 3)), "model.norm", "lm_head"],
    ]
    named = Case("1F1B", options=(("module_fqns_per_model_part", names),))
    check(2, [named, Case("GPipe", "qwen3_moe", options=(("balance", "cost"),))])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallelize", "schedules"),
    [
        (None, ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")),
        ("fsdp", ("1F1B", "InterleavedZeroBubble", "DualPipeV")),
        pytest.param("fsdp", ("GPipe", "Interleaved1F1B", "ZBVZeroBubble", "1F1B"), marks=pytest.mark.slow),
    ],
)
def test_with_data_parallelism(parallelize: str | None, schedules: tuple[str, ...]):
    """2 stages x 2 data-parallel ranks: FSDP2, and plain parameters summed once after each step."""
    options = (("parallelize", parallelize),) if parallelize else ()
    kinds = itertools.cycle(("variable", "tied", "empty", "masked"))
    check(4, [Case(s, "qwen3", kind, dp=2, options=options) for s, kind in zip(schedules, kinds, strict=False)])


NESTED = (("parallelize", "layers"), ("patch_stage_backward_maybe_with_nosync", True))
EAGER = (("parallelize", "fsdp"), ("defer_fsdp_grad_sync", False))


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [
        [
            Case("ZBVZeroBubble", "qwen3", "variable", dp=2, options=NESTED),
            Case("Interleaved1F1B", dp=2, options=EAGER),
        ],
        *slow([Case("1F1B", dp=2, options=NESTED), Case("1F1B", "qwen3", dp=2, options=EAGER)]),
    ],
    ids=["several stages a rank", "one"],
)
def test_fsdp_on_layers_only_and_reduction_per_microbatch(cases: list[Case]):
    """Experts on their own mesh look like this: FSDP inside a part, not around it."""
    check(4, cases)


@pytest.mark.parametrize(
    ("sabotage", "case", "blind"),
    [
        pytest.param("scale_grads", Case("1F1B"), ("loss",), marks=pytest.mark.slow),
        pytest.param("untied", Case("1F1B", "qwen3", "tied"), ("loss",), marks=pytest.mark.slow),
        ("counted_twice", Case("1F1B", "qwen3", "tied"), ("loss", "gradient")),
    ],
)
def test_known_bad_on_two_ranks(sabotage: str, case: Case, blind: tuple[str, ...]):
    (errors,) = launch(run_cases, 2, [case], sabotage)
    assert errors.worst > 1e-3
    assert all(getattr(errors, name) <= tolerance() for name in blind), "why loss alone is no parity test"


@pytest.mark.parametrize(
    ("sabotage", "options"),
    [pytest.param("library_cleanup", (("parallelize", "fsdp"),), marks=pytest.mark.slow), ("no_dp_sum", ())],
)
def test_known_bad_with_data_parallelism(sabotage: str, options: tuple):
    (errors,) = launch(run_cases, 4, [Case("1F1B", "qwen3", "variable", dp=2, options=options)], sabotage)
    assert errors.worst > 1e-3
