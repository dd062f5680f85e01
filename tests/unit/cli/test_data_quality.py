"""`automodel data quality`: report, filter, evaluations by config, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("rensa")
pytest.importorskip("py3langid")

from automodel_cli.cli.main import run
from tests.errors import assert_error
from tests.unit.data.helpers import write_jsonl

QUESTION = "How many clips did she sell altogether in April and in May of this year and the last one"
EVALUATION = """
_target_: automodel_cli.evaluation.config.EvalConfig
tasks:
  choices: {_target_: automodel_cli.evaluation.config.MultipleChoice, path: questions.jsonl}
  own: {_target_: automodel_cli.evaluation.config.Generation}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))
    rows = [{"body": "one two three four five six"}, {"body": f"Tell me: {QUESTION}?"}]
    write_jsonl(tmp_path / "rows.jsonl", [*rows, rows[0]])
    write_jsonl(tmp_path / "questions.jsonl", [{"question": QUESTION, "choices": ["1", "2"], "answer": 0}])
    Path("eval.yaml").write_text(EVALUATION)


def test_an_evaluation_is_named_by_its_config_or_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("eval.yaml", "questions.jsonl"):
        assert run(["data", "quality", "rows.jsonl", "--column", "body", "--against", name, "--report", "r.json"]) == 0
        found = json.loads(Path("r.json").read_text())
        assert found["overlap"]["examples"] == [
            {"row": "rows.jsonl:2", "evaluation": "questions.jsonl:1", "coverage": 1.0}
        ]
        assert found["exact"]["examples"] == [{"size": 2, "rows": ["rows.jsonl:1", "rows.jsonl:3"]}]
    assert "the task own has no dataset of its own" in capsys.readouterr().err
    assert not Path("clean").exists()  # a report changes nothing


def test_rows_are_removed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--column", "body", "--checks", "exact", "--remove", "exact", "--write", "clean", "--compression", "zst"]
    assert run(["data", "quality", "rows.jsonl", *options]) == 0
    assert "data.path=clean/rows.jsonl.zst" in capsys.readouterr().out
    assert (
        run(["data", "quality", "clean/rows.jsonl.zst", "--column", "body", "--checks", "exact", "--report", "r"]) == 0
    )
    assert json.loads(Path("r").read_text())["num_rows"] == 2
    assert run(["data", "quality", "rows.jsonl", *options]) == 3
    assert_error(capsys.readouterr().err, "file_exists")


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--remove", "exact"], "requires_setting"),
        (["--write", "clean"], "requires_setting"),
        (["--format", "nothing"], "invalid_choice"),
        (["--format", "messages", "--column", "body"], "unsupported_combination"),
        (["--against", "questions.jsonl,part=2"], "invalid_value"),
        (["--against", "missing.jsonl"], "missing_file"),
        (["--against", "quickstart"], "not_enough_rows"),
        (["--checks", "overlap"], "requires_setting"),
        ([], "unknown_format"),  # no column has a known name
    ],
)
def test_errors_name_the_option(options: list[str], code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "quality", "rows.jsonl", *options]) in (2, 3)
    assert_error(capsys.readouterr().err, code)
