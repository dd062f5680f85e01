"""Run folders that somebody has edited, or that another version has written: every command reads what it can."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from automodel_cli.cli.main import cli
from automodel_cli.runs.run_record import read_record
from automodel_cli.training.metrics_file import read_metrics

MOMENTS = ("2026-01-01T00:00:00+00:00", "2026-01-01T00:00:10+00:00")
GOOD: dict[str, Any] = {
    "command": "automodel finetune llm -c x.yaml",
    "recipe": "sft",
    "num_steps": 3,
    "about": {"data": "9 rows"},
    "data": {
        "contents": [["a.jsonl", "b" * 20]],
        "statistics": [{"name": "a", "text": "t", "edges": [0, 1, 2], "counts": [1, 2], "trained": 0.5, "fill": None}],
    },
    "numbers": {"loss": "0.1"},
    "samples": [{"prompt": "p", "after": "a"}],
    "layout": {"pp": 2, "dp_shard": 2},
    "attempts": [
        {
            "began": MOMENTS[0],
            "ended": MOMENTS[1],
            "state": "failed",
            "host": "h",
            "process": 3,
            "command": "c",
            "code": {"version": "1"},
            "environment": {"torch": "2", "device": "2 x cpu"},
            "error": "E: x",
        }
    ],
}
ODD: list[Any] = [
    None, [], {}, "x", -1, 1.5, True, [1], [{}], [[]], {"a": 1}, {"a": None}, [None], "2026-01-01T00:00:00",
    {"pp": "<b>"}, 10**400, [[1, 2]], {"statistics": [{"name": "x", "text": "y", "counts": [1]}]},
]  # fmt: skip
ROWS = (
    '{"step": 1, "loss": 2.0}\n{"step": [1]}\n{"step": 1e999}\n{"step": true}\n{"loss": 1}\n[]\n'
    '{"step": 2, "loss": "x", "lr": 1e999}\n{"step": 3, "loss": null, "x\\u001b[2J": 1}\n' + "[" * 100_000 + "\n"
)
COMMANDS = ("runs ls", "runs ls --json", "runs show odd", "runs diff odd good", "runs tail --no-follow odd")


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield from places(tree[key], (*path, key))


def put(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    tree = json.loads(json.dumps(tree))
    place = tree
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return tree


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("odd", "good"):
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("a: 1  # x.yaml:1\n")
        (run / "metrics.jsonl").write_text(ROWS)
        (run / "run.json").write_text(json.dumps(GOOD))
    return tmp_path


def answer(command: str) -> str:
    arguments = command.split()
    done = CliRunner().invoke(cli, arguments, obj=arguments)
    assert done.exception is None, (command, done.exc_info)
    return done.output


def test_a_whole_record_is_read_as_it_is(home: Path) -> None:
    assert read_record(home / "runs" / "good") == GOOD
    assert [row["step"] for row in read_metrics(home / "runs" / "good" / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("shift", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 11))])
def test_one_odd_record_hides_no_run(home: Path, shift: int) -> None:
    commands = [*COMMANDS, "report runs/odd"]
    for number, place in enumerate(places(GOOD)):
        text = json.dumps(put(GOOD, place, ODD[(number + shift) % len(ODD)]))
        (home / "runs" / "odd" / "run.json").write_text(text)
        assert "good" in answer("runs ls"), text
        answer(commands[number % len(commands)])


@pytest.mark.parametrize("text", ["", "{", "\xff", "[" * 100_000, "1" * 5000, '{"attempts": {}}'])
def test_a_record_that_is_no_json_is_none(home: Path, text: str) -> None:
    (home / "runs" / "odd" / "run.json").write_bytes(text.encode("latin-1"))
    assert read_record(home / "runs" / "odd") == {}
    for command in COMMANDS:
        answer(command)


def test_what_is_no_file_is_not_waited_for(home: Path) -> None:
    for name in ("run.json", "metrics.jsonl", ".lock"):
        path = home / "runs" / "odd" / name
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    for command in COMMANDS:
        answer(command)


def test_the_name_of_a_run_is_no_markup(home: Path) -> None:
    (home / "runs" / "odd").rename(home / "runs" / "a[b][red]")
    assert "a[b][red]" in answer("runs ls")


def test_no_text_of_a_record_reaches_the_terminal_as_an_order(home: Path) -> None:
    text = json.dumps(GOOD).replace('"failed"', '"failed\\u001b]0;x\\u0007"').replace("9 rows", "\\u001b[2J\\u009b9")
    (home / "runs" / "odd" / "run.json").write_text(text)
    for command in COMMANDS:
        assert not any(order in answer(command) for order in ("\x1b]", "\x1b[2J", "\x07", "\x9b")), command
    assert "\\x1b[2J\\x9b9" in answer("runs show odd")
