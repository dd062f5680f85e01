"""When a run ends early, and which checkpoint is the best: sequences and folders written by hand."""

from __future__ import annotations

import json
import math
import os

import pytest

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.data.config import DataConfig
from automodel_cli.run.checkpoint_selection import chosen_checkpoint
from automodel_cli.run.checks.cross_section_checks import check_validation
from automodel_cli.training.checkpoint.directory import CheckpointDir
from automodel_cli.training.config import ValidationConfig
from automodel_cli.training.early_stopping import EarlyStop, Goal
from tests.errors import raises

NAN = math.nan


@pytest.mark.parametrize(
    ("goal", "values", "patience", "end", "best"),
    [
        (Goal(), [3.0, 2.0, 2.5, 2.1, 1.0], 2, 4, 2),
        (Goal(), [3.0, 2.0, 2.0, 1.9, 1.9, 1.9], 2, 6, 4),  # equal is no improvement
        (Goal("val_reward", True), [0.1, 0.3, 0.2, 0.4], 2, None, 4),
        (Goal(), [NAN, 5.0, NAN, NAN], 2, 4, 2),
        (Goal(), [NAN, NAN, 1.0], 2, 2, None),
        (Goal(), [1.0, 2.0, 3.0], None, None, 1),
    ],
)
def test_a_run_ends_after_patience_validations_without_improvement(goal, values, patience, end, best):
    early = EarlyStop(goal, patience)
    early.add(0, -100.0 if not goal.maximize else 100.0)  # before training: no checkpoint has these weights
    ended = None
    for step, value in enumerate(values, 1):
        early = resumed(early)
        early.add(step, value)
        assert early.improved(step) is (patience is not None and early.best_step == step)
        if early.is_over:
            ended = step
            break
    assert (ended, early.best_step) == (end, best)


def resumed(early: EarlyStop) -> EarlyStop:
    """What a run knows that goes on from a checkpoint."""
    other = EarlyStop(early.goal, early.patience)
    other.load_state_dict(json.loads(json.dumps(early.state_dict())))
    return other


def test_another_metric_begins_anew():
    early = EarlyStop(Goal(), 1, best=1.0, best_step=3, waited=1)
    other = EarlyStop(Goal("val_reward", True), 1)
    other.load_state_dict(early.state_dict())
    assert other.best is None and not other.is_over


@pytest.mark.parametrize(
    ("options", "code", "key"),
    [
        ({"patience": 2}, "no_effect", "every"),
        ({"patience": 0, "every": 1}, "out_of_range", "patience"),
        ({"metric": "val_reward"}, "requires_setting", "direction"),
        ({"direction": "up"}, "invalid_choice", "direction"),
    ],
)
def test_an_impossible_patience_is_an_error(options, code, key):
    with raises(ConfigError, code, keys=(key,), values=tuple(options.values())) as caught:
        ValidationConfig(**options)
    assert caught.value.fix


def test_patience_needs_something_that_is_measured(tmp_path):
    waits = ValidationConfig(every=1, patience=1)
    rows = DataConfig(path="x.jsonl", seq_len=8, validation_size=2)
    check_validation(waits, rows)
    with pytest.raises(ConfigError) as caught:
        check_validation(waits, rows, "grpo")
    assert caught.value.fix == "validation.metric=val_reward validation.direction=max"
    check_validation(ValidationConfig(every=1, patience=1, metric="val_reward", direction="max"), rows, "grpo")


def folder_of(tmp_path, values, goal):
    """A run with a checkpoint for each value."""
    folder = CheckpointDir(tmp_path / "checkpoints", goal)
    folder.path.mkdir(parents=True)
    for step, value in values.items():
        written = folder.path / f"step-{step:06d}.tmp-1"
        written.mkdir()
        final = folder.path / f"step-{step:06d}"
        folder.publish(written, final, {"step": step, "metrics": {goal.metric: value}, "extra": {}})
        folder.link_if_best(final, value)
    return folder


@pytest.mark.parametrize(("maximize", "best"), [(False, 4), (True, 6)])
def test_the_best_link_follows_the_direction(tmp_path, maximize, best):
    folder = folder_of(tmp_path, {2: 0.5, 4: 0.1, 6: 0.9, 8: NAN}, Goal("val_x", maximize))
    assert folder.best() == (folder.path / f"step-{best:06d}").resolve()


def test_a_checkpoint_is_chosen_by_name(tmp_path):
    folder = folder_of(tmp_path, {2: 0.5, 4: 0.1, 60: 0.9}, Goal())
    for choice, step in (("best", 4), ("last", 60), ("2", 2), ("step-000004", 4), ("0004", 4), (None, 60)):
        assert chosen_checkpoint(tmp_path, choice).resolve().name == f"step-{step:06d}"
    assert chosen_checkpoint(tmp_path, None, prefers_best=True).resolve().name == "step-000004"
    for choice, fix in (("50", "--checkpoint 60"), ("later", "--checkpoint last")):
        with pytest.raises(RunError) as caught:
            chosen_checkpoint(tmp_path, choice)
        assert caught.value.fix == fix and "2, 4, 60" in caught.value.message
    os.unlink(folder.path / "best")
    assert chosen_checkpoint(tmp_path, None, prefers_best=True).name == "step-000060"
    with pytest.raises(RunError) as caught:
        chosen_checkpoint(tmp_path, "best")
    assert caught.value.fix == "--checkpoint last"
    with pytest.raises(RunError):
        chosen_checkpoint(tmp_path / "nothing", "last")
