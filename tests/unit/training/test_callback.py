"""The list of callbacks: its order, its names, and what one of a user may not do."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from automodel_cli.config.errors import RunError
from automodel_cli.training.callback import Callback, Callbacks
from tests.errors import assert_error, raises


class Says(Callback):
    """Returns what it is told to from every hook, or raises it."""

    def __init__(self, answer: Any, end: Exception | None = None):
        self.answer, self.end, self.seen, self.state = answer, end, [], "never started"

    def on_start(self, run, state):
        self.state = state

    def on_step(self, run, step, values):
        self.seen.append(dict(values))
        return self.answer

    def on_checkpoint(self, run, step):
        return self.answer

    def on_end(self, run, succeeded):
        if self.end is not None:
            raise self.end


def started(own: list[Callback], users: list[Callback], states: dict[str, Any] | None = None) -> Callbacks:
    printed: list[str] = []
    run = SimpleNamespace(run_dir=Path("runs/x"), print=printed.append, printed=printed)
    callbacks = Callbacks(run, states or {})  # type: ignore[arg-type]
    for callback in own:
        callbacks.add(callback)
    callbacks.start(users)
    return callbacks


def test_each_sees_what_was_found_before_it_and_the_recipes_own_come_first() -> None:
    own, first, second = Says({"a": 1}), Says({"b": 2}), Says(None)
    callbacks = started([], [first, second])
    callbacks.add(own)
    assert callbacks.step(1, {"loss": 0.5}) == {"a": 1, "b": 2}
    assert own.seen == [{"loss": 0.5}]
    assert first.seen == [{"loss": 0.5, "a": 1}]
    assert second.seen == [{"loss": 0.5, "a": 1, "b": 2}]


def test_two_of_a_class_keep_their_own_state() -> None:
    states = started([], [Says(1), Says(2)]).checkpoint(3)
    assert sorted(states.values()) == [1, 2]
    again = [Says(None), Says(None)]
    callbacks = started([], list(again), {**states, "gone.Other": 7})
    assert [one.state for one in again] == [1, 2] and callbacks.unclaimed() == ["gone.Other"]


@pytest.mark.parametrize(
    ("answer", "values"),
    [
        ({"loss": 1.0}, ["'loss'", "column"]),
        ({"mfu": 1.0}, ["'mfu'", "column"]),
        ({"text": "much"}, ["'text'", "'much'", "number"]),
        (3, [3, "mapping"]),
    ],
)
def test_columns_that_no_row_can_hold_are_refused(answer: Any, values: list[object]) -> None:
    with raises(RunError, "callback_failed", keys=("callbacks",), values=("Says.on_step", *values)):
        started([], [Says(answer)]).step(1, {"loss": 0.5})


def test_state_that_is_no_json_is_refused_before_anything_is_written() -> None:
    with raises(RunError, "callback_failed", values=("Says", "on_checkpoint", "step 2", "TypeError")):
        started([], [Says({1})]).checkpoint(2)


def test_every_one_hears_of_the_end_and_the_first_failure_counts() -> None:
    users = [Says(None, ValueError("one")), Says(None, KeyError("two")), Says(None)]
    callbacks = started([], list(users))
    failure = callbacks.end(succeeded=True)
    assert isinstance(failure, RunError)
    assert_error(failure, "callback_failed", "callbacks", values=("on_end", "ValueError: one"))
    printed = callbacks._run.printed  # type: ignore[attr-defined]
    assert len(printed) == 1 and "KeyError" in printed[0]
    assert callbacks.end(succeeded=False) is None and len(printed) == 3  # the run's own failure is the one to show


def test_what_the_recipes_own_raises_is_a_bug_and_keeps_its_traceback() -> None:
    with pytest.raises(AttributeError):
        started([SimpleNamespace()], [])  # type: ignore[list-item]
