"""Which samples of a run are shown, and what a line of them says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from automodel_cli.cli.main import run as command_line
from automodel_cli.config.errors import ConfigError
from automodel_cli.runs.index import RunEntry
from automodel_cli.runs.report_page import shown_run
from automodel_cli.runs.rollouts import RolloutFilter, newest, select
from tests.errors import raises


def sample(step: int, reward: float, prompt: str = "2 + 2?", completion: str = "4", **more: object) -> dict:
    return {
        "step": step,
        "prompt": [{"role": "user", "content": prompt}],
        "completion": completion,
        "reward": reward,
        "parts": {"exact": reward},
        "errors": {},
        "advantage": reward - 0.5,
        "trained": True,
        "num_tokens": 3,
        "finish_reason": "stop",
        "origin": "rows.jsonl:7",
        **more,
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        sample(1, 0.0, completion="5"),
        sample(1, 1.0, trained=False),
        sample(2, 0.5, prompt="Which DAY is it?", completion="Monday"),
        sample(3, 1.0, turns=[{"role": "assistant", "content": "<calc>"}, {"role": "tool", "content": "Monday"}]),
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "rollouts.jsonl").write_text(text + '{"step": 4, "prom')  # a run that goes on is writing this one
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "steps"),
    [
        (RolloutFilter(), [3, 2, 1, 1]),
        (RolloutFilter(steps=(2, None)), [3, 2]),
        (RolloutFilter(steps=(1, 2)), [2, 1, 1]),
        (RolloutFilter(least=0.5, most=0.5), [2]),
        (RolloutFilter(prompt="day"), [2]),
        (RolloutFilter(completion="monday"), [3, 2]),  # what the environment said counts
        (RolloutFilter(trained=True), [3, 2, 1]),
    ],
)
def test_samples_are_chosen(folder: Path, wanted: RolloutFilter, steps: list[int]) -> None:
    rows, total = select(folder, wanted, 10, "newest")
    assert [row["step"] for row in rows] == steps and total == len(steps)


def test_the_newest_are_read_from_the_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [row["step"] for row in newest(folder, 3)] == [3, 2, 1]
    monkeypatch.setattr("automodel_cli.runs.rollouts._TAIL_BYTES", 500)  # begins inside a line
    assert [row["step"] for row in newest(folder, 9)] == [3]
    assert newest(folder / "none", 3) == []


def test_a_report_without_held_out_answers_shows_training_samples(folder: Path) -> None:
    samples = shown_run(RunEntry(folder)).samples
    assert [(s.prompt, s.reward) for s in samples] == [("2 + 2?", "1"), ("Which DAY is it?", "0.5")]
    assert "[tool: Monday]" in samples[0].after


def test_order_and_number(folder: Path) -> None:
    best, total = select(folder, RolloutFilter(), 2, "best")
    assert [(row["step"], row["reward"]) for row in best] == [(3, 1.0), (1, 1.0)] and total == 4
    (worst,), _ = select(folder, RolloutFilter(), 1, "worst")
    assert worst["completion"] == "5"


def test_a_run_without_samples_is_told_apart(tmp_path: Path) -> None:
    with raises(ConfigError, "wrong_recipe", values=(tmp_path, "rollouts.jsonl")):
        select(tmp_path, RolloutFilter(), 1, "newest")


def test_what_a_model_said_does_not_reach_the_terminal_as_a_command(
    folder: Path, capsys: pytest.CaptureFixture
) -> None:
    escape = "\x1b[2J"
    row = sample(5, 1.0, prompt=escape, completion=escape, origin=escape, errors={"exact": escape})
    (folder / "rollouts.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "config.yaml").write_text("seed: 0\n")
    assert command_line(["runs", "rollouts", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert escape not in printed and printed.count(r"\x1b[2J") == 4


def test_the_command_prints_what_was_said_and_what_it_was_worth(folder: Path, capsys: pytest.CaptureFixture) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 3, "loss": 0.5}\n')
    (folder / "config.yaml").write_text("seed: 0\n")
    assert command_line(["runs", "rollouts", str(folder), "--step", "3"]) == 0
    printed = capsys.readouterr().out
    assert "step 3  reward 1 (exact 1)  advantage +0.50  stop after 3 tokens  rows.jsonl:7" in printed
    assert "[tool: Monday]" in printed and "1 of 1 samples, newest first" in printed
    assert command_line(["runs", "rollouts", str(folder), "--step", "a:b"]) == 2
    assert "--step 40:60" in capsys.readouterr().err
