"""Every error has a registered code, every code is used, and the code reaches the user and other processes."""

from __future__ import annotations

import ast
import logging
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from automodel_cli.cli.main import render
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.diagnostics import Origin, Problem, as_error
from automodel_cli.config.error_codes import ALL_CODES, CODES, ROW_CODES
from automodel_cli.config.errors import ConfigError, DataError, RunError
from automodel_cli.config.warn import warn
from automodel_cli.dryrun.command import DryRunError
from automodel_cli.pipelining.cut.layout_string import LayoutError
from automodel_cli.pipelining.cut.model_structure import NotMeasuredError, SplitError
from automodel_cli.rollout.http import ServerError
from automodel_cli.runs.run_record import RunRecord, read_record
from automodel_cli.training.step import NonFiniteError
from tests.errors import assert_error, raises
from tests.pages import ROOT

OWN_CODE = {"SplitError", "NotMeasuredError", "NonFiniteError", "OutOfMemory", "DryRunError"}
"""Classes with one cause, whose code is an attribute of the class."""
KINDS = {"ConfigError", "DataError", "RunError", "ServerError", "PlacementError", "LayoutError"}


def calls() -> Iterator[tuple[str, ast.Call]]:
    for folder in ("automodel_cli", "recipes"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def literals(node: ast.expr) -> list[str]:
    """The codes that an argument may be: a text, or a choice between texts."""
    if isinstance(node, ast.IfExp):
        return [*literals(node.body), *literals(node.orelse)]
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def test_every_error_has_a_registered_code():
    """`code=` is a text, or passes on a code: `error.code`, or the parameter `code` of a helper."""
    without, unknown = [], []
    for place, node in calls():
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        code = next((word.value for word in node.keywords if word.arg == "code"), None)
        if name in KINDS:
            passed_on = isinstance(code, (ast.Name, ast.Attribute)) and ast.unparse(code).endswith("code")
            from_other_process = any(word.arg is None for word in node.keywords)
            if not from_other_process and (code is None or not (literals(code) or passed_on)):
                without.append(place)
        given = [code] if code is not None else []
        if name in ("RowError", "Problem", "warn"):
            given += node.args[:1]
        unknown += [f"{place} {text}" for part in given for text in literals(part) if text not in ALL_CODES]
    assert without == [] and unknown == []


def test_every_code_is_used():
    texts = set()
    for folder in ("automodel_cli", "recipes"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "error_codes.py":
                tree = ast.parse(path.read_text(encoding="utf-8"))
                texts |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    layouts = {"no-embedding", "no-loss", "duplicate-embedding", "duplicate-loss"}  # built from two parts
    assert set(ALL_CODES) - texts - layouts == set()


def test_every_code_has_a_cause_and_a_remedy():
    for name, code in ALL_CODES.items():
        for text in (code.cause, code.remedy):
            assert re.match(r"[A-Z`]", text) and text.endswith(".") and len(text.split()) <= 25, name
    assert all(re.fullmatch(r"[a-z]+(_[a-z0-9]+)*", name) for name in {**CODES, **ROW_CODES})


ERRORS = [
    ConfigError("too few", code="out_of_range", keys=("train.max_steps",), origin="x.yaml:1", fix="train.max_steps=1"),
    DataError("a row"),
    RunError("a rank", code="rank_failure"),
    SplitError("Llama", "it has two lists"),
    NotMeasuredError("Llama", "it does not run"),
    LayoutError("a stage", code="bad-item-type", position=(0, 1)),
    NonFiniteError("loss is nan", [3, 4], "optimizer.lr=1e-6"),
    ServerError("gone", code="server_unreachable", keys=("rollout.engine.url",)),
    DryRunError("no kernel"),
    as_error(
        [
            Problem("unknown_key", "a", "no a", Origin("x.yaml", 1)),
            Problem("missing_key", "b", "no b", Origin("x.yaml")),
        ],
        "x",
    ),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)
def test_errors_survive_the_way_to_another_process(error):
    """Ranks send errors to each other and workers to their parent."""
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error) and copy.__dict__ == error.__dict__ and str(copy) == str(error)
    assert copy.full_text == f"{type(error).__name__} [{error.code}]: {error}" == click.unstyle(render(copy))


def test_user_code_needs_no_code():
    class Mine(DataError):
        pass

    assert (ConfigError("x").code, Mine("x").code, RunError("x").code) == (
        "invalid_config",
        "invalid_data",
        "run_failed",
    )


def test_several_errors_are_listed_with_their_codes():
    error = ERRORS[-1]
    assert error.code == "several_errors" and error.problems == (("missing_key", "b"), ("unknown_key", "a"))
    assert "x.yaml:1  [unknown_key] no a" in str(error)


def test_the_record_of_a_run_keeps_the_code(tmp_path):
    composed = compose("quickstart")
    RunRecord(tmp_path, composed).end("failed", ERRORS[2])
    (attempt,) = read_record(tmp_path)["attempts"]
    assert (attempt["error"], attempt["error_code"]) == ("RunError [rank_failure]: a rank", "rank_failure")
    RunRecord(tmp_path, composed).end("failed", ValueError("a bug"))
    assert read_record(tmp_path)["attempts"][-1]["error"] == "ValueError: a bug"


def test_a_warning_has_a_code(caplog):
    with caplog.at_level(logging.WARNING):
        warn("no_effect", "%s has no effect", "nccl_ub")
    (record,) = caplog.records
    assert record.getMessage() == "[no_effect] nccl_ub has no effect" and record.code == "no_effect"
    assert Path(record.pathname).name == Path(__file__).name


def test_assertions_on_errors_can_fail():
    error = ERRORS[0]
    text = f"starting\n{error.full_text}\n"
    for case in (error, text):
        assert_error(case, "out_of_range", "train.max_steps", values=("few", 1), fix="train.max_steps=1")
        for code, key, value, fix in (
            ("missing_key", "train.max_steps", 1, "train.max_steps=1"),
            ("out_of_range", "train.epochs", 1, "train.max_steps=1"),
            ("out_of_range", "train.max_steps", 2, "train.max_steps=1"),
            ("out_of_range", "train.max_steps", "ew", "train.max_steps=1"),
            ("out_of_range", "train.max_steps", 1, "train.max_steps=2"),
            ("no_such_code", "train.max_steps", 1, "train.max_steps=1"),
        ):
            with pytest.raises(AssertionError):
                assert_error(case, code, key, values=(value,), fix=fix)
    several = ERRORS[-1]
    assert_error(several, "unknown_key", "a")
    with pytest.raises(AssertionError):
        assert_error(several, "unknown_key", "b")
    with pytest.raises(AssertionError), raises(ConfigError, "missing_key"):
        raise error
    with raises(ConfigError, "out_of_range", keys=("train.max_steps",)):
        raise error
