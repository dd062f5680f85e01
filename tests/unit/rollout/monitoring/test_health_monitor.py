"""What is said of a run that goes wrong slowly, and when."""

from __future__ import annotations

from automodel_cli.rollout.monitoring.health_monitor import HealthMonitor

FINE = {
    "truncation_rate": 0.1,
    "num_zero_std_groups": 3,
    "num_unused_groups": 3,
    "num_groups": 8,
    "reward_zero_std_groups": 0.5,
    "entropy": 1.0,
}


def said(*steps: dict[str, float]) -> list[list[str]]:
    alarms = HealthMonitor(max_new_tokens=128)
    return [alarms.of({**FINE, **values}, {}) for values in steps]


def test_a_good_run_is_not_commented():
    assert said(*[{"entropy": 1.0 - 0.04 * step, "truncation_rate": 0.5} for step in range(20)]) == [[]] * 20


def test_responses_that_are_cut_off_are_said_at_the_fifth_step_and_once():
    found = said(*[{"truncation_rate": 0.75}] * 12)
    assert [bool(lines) for lines in found] == [False] * 4 + [True] + [False] * 7
    assert "now 75%" in found[4][0] and "rollout.max_new_tokens=128" in found[4][0]


def test_a_good_step_between_bad_ones_begins_the_count_anew():
    found = said(*[{"truncation_rate": 0.75}] * 4, {}, *[{"truncation_rate": 0.75}] * 5)
    assert [bool(lines) for lines in found] == [False] * 9 + [True]


def test_groups_that_teach_nothing_are_said_with_their_reward():
    *_, (line,) = said(*[{"num_zero_std_groups": 8, "num_unused_groups": 8, "reward_zero_std_groups": 1.0}] * 5)
    assert "now 8 of 8, mean reward 1" in line
    assert said(*[{"num_zero_std_groups": 8, "num_unused_groups": 0}] * 5) == [[]] * 5  # a critic learns from them


def failing(*steps: dict[str, tuple[int, int]]) -> list[list[str]]:
    alarms = HealthMonitor(max_new_tokens=128)
    return [alarms.of(FINE, failures) for failures in steps]


def test_a_reward_that_fails_on_everything_it_judges():
    *_, (line,) = failing(*[{"exact": (0, 64), "code": (4, 4)}] * 5)
    assert "reward code failed on every sample (now 4 of 4)" in line
    assert failing(*[{"code": (3, 4)}] * 5) == [[]] * 5


def test_steps_without_rows_that_a_reward_judges_say_nothing_of_it():
    found = failing(*[{"code": (4, 4)}, {}] * 4, {"code": (2, 2)})
    assert [len(lines) for lines in found] == [0] * 8 + [1]


def test_entropy_that_collapses_is_measured_against_the_first_steps():
    found = said(*[{"entropy": 2.0}] * 5, *[{"entropy": 0.19}] * 5)
    assert not any(found[:9]) and "(2 nats, now 0.19)" in found[9][0]
    assert said(*[{"entropy": 2.0}] * 5, *[{"entropy": 0.21}] * 8) == [[]] * 13


def test_steps_without_an_update_neither_add_to_a_collapse_nor_end_it():
    """A model whose samples are all the same has few updates, and only those measure an entropy."""
    nothing = {"entropy": None}
    found = said(*[{"entropy": 2.0}] * 5, *[{"entropy": 0.1}, nothing] * 4, {"entropy": 0.1})
    assert not any(found[:13]) and "(2 nats, now 0.1)" in found[13][0]


def test_a_resumed_run_is_measured_against_its_beginning():
    alarms = HealthMonitor(max_new_tokens=128, first_entropies=[2.0] * 5 + [0.1] * 20)
    *_, (line,) = [alarms.of({**FINE, "entropy": 0.1}, {}) for _ in range(5)]
    assert "(2 nats, now 0.1)" in line


def stops(*steps: dict[str, tuple[int, int]]) -> list[str | None]:
    alarms = HealthMonitor(max_new_tokens=128)
    return [alarms.broken(failures) for failures in steps]


def test_a_reward_that_has_never_worked_stops_the_run():
    assert stops({"exact": (0, 64), "code": (64, 64)}) == ["code"]
    assert stops(*[{"code": (3, 3)}] * 3) == [None, None, "code"]  # nine samples, over steps
    assert stops({"code": (7, 8)}, *[{"code": (8, 8), "exact": (0, 8)}] * 9) == [None] * 10


def test_steps_in_which_no_reward_gives_a_number_stop_the_run():
    """A server that was there, and is gone."""
    assert stops({"judge": (0, 8)}, *[{"judge": (8, 8)}] * 5) == [None] * 5 + ["judge"]
    assert stops({"judge": (0, 8)}, *[{"judge": (8, 8)}] * 4, {}, {"judge": (7, 8)}, {"judge": (8, 8)}) == [None] * 8
