"""Programs: complete, equal to what torch publishes, refused before launch where they cannot run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from automodel_cli.config.errors import ConfigError
from automodel_cli.pipelining.schedule.actions import from_torch, to_torch
from automodel_cli.pipelining.schedule.program import (
    Action,
    Overlap,
    Program,
    check_complete,
    forward_only_program,
    read_csv,
)
from automodel_cli.pipelining.schedule.programs import build_program
from automodel_cli.pipelining.schedule.schedules import (
    SCHEDULES,
    check_composition,
    check_schedule,
    find_schedule,
)
from automodel_cli.pipelining.timeline.simulator import even_costs, simulate
from tests.errors import raises

CASES = [
    (schedule, p, m, v)
    for schedule in SCHEDULES
    for p in (1, 2, 3, 4)
    for m in (1, 2, 5, 8, 13)
    for v in ([1] if schedule.kind == "single" else [2] if schedule.style == "v" else [1, 2, 3])
]


def legal(case):
    try:
        check_schedule(*case)
        return True
    except ConfigError:
        return False


@pytest.mark.smoke
def test_every_legal_program_is_complete_and_runs():
    cases = [case for case in CASES if legal(case)]
    assert len(cases) > 150
    for schedule, p, m, v in cases:
        program = build_program(schedule, p, m, v)
        check_complete(program)
        timeline = simulate(program, even_costs(program))
        assert timeline.makespan >= timeline.lower_bound - 1e-9, (schedule.name, p, m, v)
        check_complete_forward = forward_only_program(program)
        simulate(check_complete_forward, even_costs(check_complete_forward))


def test_refusals_are_torchs_own():
    """What torch's constructors accept is accepted, and what they refuse is refused."""
    for schedule, p, m, v in CASES:
        if schedule.torch_class is None or p == 1:
            continue
        stages = [
            SimpleNamespace(
                stage_index=k,
                num_stages=p * v,
                group_size=p,
                group_rank=0,
                is_first=k == 0,
                is_last=False,
                submod=None,
                has_backward=True,
            )
            for k in range(v)
        ]
        schedule_class = torch_schedules.get_schedule_class(schedule.torch_class)
        try:
            schedule_class(stages if schedule.kind == "multi" else stages[0], m, scale_grads=False)
            accepted = True
        except ValueError:
            accepted = False
        assert legal((schedule, p, m, v)) == accepted, (schedule.name, p, m, v)


def test_single_stage_programs_equal_torchs_published_order():
    """All ranks but 1F1B's last, where torch's published order differs from the loop it executes."""
    for name, p, m in [("GPipe", 4, 6), ("1F1B", 4, 8), ("1F1B", 2, 2), ("1F1B", 3, 5)]:
        stage = SimpleNamespace(
            stage_index=0, num_stages=p, group_size=p, group_rank=0, is_first=True, is_last=False, has_backward=True
        )
        order = torch_schedules.get_schedule_class(name)(stage, m, scale_grads=False)._get_pipeline_order()
        program = build_program(name, p, m)
        for rank in range(p - (name == "1F1B")):
            compute = [action for action in order[rank] if action is None or action.is_compute_op]
            assert from_torch(compute) == program.ranks[rank], (name, p, m, rank)


def test_grouped_interleaving_is_torchs_at_its_own_group():
    for p, m, v in [(2, 4, 2), (4, 8, 2), (2, 6, 3), (4, 10, 2)]:
        group = m // max(1, m // p)
        assert (
            build_program("Interleaved1F1B", p, m, v, group_size=group).ranks
            == build_program("Interleaved1F1B", p, m, v).ranks
        )


def test_torch_actions_round_trip():
    for name in ("ZBVZeroBubble", "DualPipeV", "LoopedBFS"):
        program = build_program(name, 2, 6, 2)
        for steps in program.ranks:
            actions = to_torch(steps)
            assert from_torch(actions) == steps
            assert [str(step) for step in steps] == [repr(action) for action in actions]


def test_csv_round_trip(tmp_path):
    for name, v in [("DualPipeV", 2), ("ZB-H1", 1), ("Interleaved1F1B", 2)]:
        program = build_program(name, 2, 6, v)
        path = tmp_path / f"{name}.csv"
        program.to_csv(path)
        assert read_csv(path).ranks == program.ranks and read_csv(path).owner == program.owner


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0F0,0B0\n1F0,1X0\n", ("rank 1", "cell 1", "1X0")),
        ("0F0,0B0\n1F0\n", ("microbatch 0", "stage 1")),
        ("0F0,0B0,0B0\n1F0,1B0\n", ("0B0", "rank 0")),
        ("0B0,0F0\n1F0,1B0\n", ("0B0", "0F0", "rank 0")),
        ("0F0,0B0,1F0,1B0\n1F0,1B0\n", ("stage 1", 0, 1)),
        ("0F0,0I0,0W0\n2F0,2B0\n", ("[0, 2]", 2)),
    ],
)
def test_invalid_csv(tmp_path, text, values):
    path = tmp_path / "plan.csv"
    path.write_text(text)
    with raises(ConfigError, "invalid_schedule", values=values):
        read_csv(path)
    with raises(ConfigError, "missing_file", keys=("schedule_csv",), values=(tmp_path / "absent.csv",)):
        read_csv(tmp_path / "absent.csv")


def test_deadlock_is_named():
    a = (Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1))
    b = (Action("F", 1, 1), Action("B", 1, 1), Action("F", 1, 0), Action("B", 1, 0))
    program = Program("mine", 2, (0, 1), (a, b))
    with raises(ConfigError, "invalid_schedule", values=("mine", "rank 0 at 0B0", "rank 1 at 1F1")):
        simulate(program, even_costs(program))


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "group", "code", "value", "fix"),
    [
        ("1F1B", 4, 3, 1, None, "out_of_range", "3 < 4", "4 microbatches"),
        ("1F1B", 4, 8, 2, None, "stage_count", 2, "Interleaved1F1B"),
        ("Interleaved1F1B", 4, 13, 2, None, "not_divisible", "13 % 3 = 1", "12 microbatches"),
        ("Interleaved1F1B", 4, 8, 2, 3, "out_of_range", "microbatch_group_size=3", "microbatch_group_size=4"),
        ("Interleaved1F1B", 4, 8, 2, 5, "not_divisible", "microbatch_group_size=5", "microbatch_group_size=4"),
        ("LoopedBFS", 4, 8, 2, 4, "no_effect", "microbatch_group_size=4", "microbatch_group_size=null"),
        ("DualPipeV", 4, 7, 2, None, "out_of_range", "7 < 8", "8 microbatches"),
        ("ZBVZeroBubble", 4, 8, 3, None, "stage_count", 3, "8 stages"),
    ],
)
def test_rules_name_value_and_fix(name, p, m, v, group, code, value, fix):
    with raises(ConfigError, code, values=(value,)) as error:
        build_program(name, p, m, v, group_size=group)
    assert fix in error.value.fix


def test_names():
    assert find_schedule("zbv") is find_schedule("ZBVZEROBUBBLE")
    assert find_schedule("1f1b").name == "1F1B"
    values = ("interleaved_1f1", "GPipe", "1F1B")
    with raises(ConfigError, "invalid_choice", keys=("schedule",), values=values, fix="schedule=Interleaved1F1B"):
        find_schedule("interleaved_1f1")


def test_composition_of_split_backwards():
    check_composition(find_schedule("1F1B"), reshard_after_forward=True, ddp_wrapper=True)
    check_composition(find_schedule("ZBV"))
    for option in ("reshard_after_forward", "ddp_wrapper", "compiled_wrapper", "checkpoint_partial"):
        with raises(ConfigError, "unsupported_combination", keys=("schedule",), values=("ZBVZeroBubble",)):
            check_composition(find_schedule("zbv"), **{option: True})


def test_too_few_microbatches_are_refused_with_the_rule():
    check_schedule(find_schedule("GPipe"), 4, 3, 1)
    check_schedule(find_schedule("ZB-H1"), 4, 3, 1)
    with raises(ConfigError, "out_of_range", values=("3 < 4",)):
        check_schedule(find_schedule("1F1B"), 4, 3, 1)
    with raises(ConfigError, "out_of_range", values=("3 < 8",)):
        check_schedule(find_schedule("DualPipeV"), 4, 3, 2)


def test_traces_of_one_forward_one_backward():
    vectors = json.loads((Path(__file__).parents[3] / "vectors" / "schedules_pp2_pp4.json").read_text())["traces"]
    for row in vectors:
        if "error" in row or row["microbatches"] < row["pp"]:
            continue
        name, v = ("1F1B", 1) if row["vp"] is None else ("Interleaved1F1B", row["vp"])
        program = build_program(name, row["pp"], row["microbatches"], v, group_size=row["group"])
        got = [f"{a.kind}{a.microbatch}.{program.chunk_of(a.stage)}" for a in program.actions(row["rank"])]
        assert got == row["compute"], row


def test_pairs_print_as_torch_does():
    assert str(Overlap(Action("F", 0, 4), Action("B", 3, 2))) == "(0F4;3B2)OVERLAP_F_B"
