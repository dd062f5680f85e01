"""A user's `data.format`: what it makes of rows, what is refused, and when prepared data is made again."""

from __future__ import annotations

import importlib
import pickle
import sys

import numpy as np
import pytest

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.preparation.pipeline import prepare_data
from automodel_cli.data.preparation.prompts import prepare_prompts
from tests.errors import raises
from tests.unit.data.helpers import tiny_tokenizer, turn, write_jsonl

MODULE = """
from dataclasses import dataclass
from automodel_cli.data.formats.examples import AnsweredPrompt, Conversation, PlainText
from spoken_words import question

@dataclass(frozen=True)
class Talk:
    greeting: str = ""
    fields = ("q", "a", "system")
    makes = "conversations"
    def read(self, row):
        said = {"role": "user", "content": self.greeting + question(row)}
        return row.conversation([said, {"role": "assistant", "content": row.text("a")}])

class Duel:
    fields = ("q", "a", "b")
    makes = "pairs"
    def read(self, row):
        return row.pair(row.text("q"), row.text("a"), row.text("b"))

class Verdict:
    fields = ("q", "a", "good")
    makes = "judged"
    def read(self, row):
        return row.judged(row.text("q"), row.text("a"), row["good"])

class Page:
    fields = ("a",)
    makes = "texts"
    def read(self, row):
        return PlainText(row.text("a"))

class Peeks(Page):
    def read(self, row):
        return PlainText(row["q"])

class Divides(Page):
    def read(self, row):
        return PlainText(str(1 // len(row["a"][2:])))

class WrongKind(Page):
    makes = "conversations"

class NoRole(Page):
    makes = "conversations"
    def read(self, row):
        return Conversation([{"content": "x"}], [True])

class TrainsTheQuestion(Page):
    makes = "conversations"
    def read(self, row):
        return Conversation([{"role": "user", "content": "x"}], [True])

class NoTurns(Page):
    makes = "conversations"
    def read(self, row):
        return AnsweredPrompt(row.text("a"), "!")

class MakesNothing(Page):
    makes = "rows"
"""
ROWS = [{"q": "one and one?", "a": "two", "b": "three", "good": True}, {"q": "why?", "a": "so", "b": "", "good": False}]
ROWS[1]["b"] = "no"


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The user's module, and beside it one that it imports."""
    (tmp_path / "talk_format.py").write_text(MODULE)
    (tmp_path / "spoken_words.py").write_text("def question(row):\n    return row.text('q')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("talk_format", "spoken_words"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("talk_format")


def prepared(folder, rows, fmt="auto", name="rows.jsonl", **options):
    options = {"seq_len": 128, "num_workers": 0, "cache_dir": str(folder / "cache"), **options}
    preferences = options.pop("preferences", False)
    config = DataConfig(path=str(write_jsonl(folder / name, rows)), format=fmt, **options)
    return prepare_data(config, tiny_tokenizer(), seed=0, preferences=preferences)


def tokens(data):
    return [tuple(np.asarray(part).tolist() for part in data.train.tokens(i)) for i in range(len(data.train))]


def messages(row):
    return [turn("user", row["q"]), turn("assistant", row["a"])]


def test_conversations_are_those_of_the_same_messages(own, tmp_path):
    ours = prepared(tmp_path, [{"messages": messages(row)} for row in ROWS], name="ours.jsonl")
    data = prepared(tmp_path, ROWS, own.Talk())
    assert tokens(data) == tokens(ours)
    assert "rows.jsonl: 2 rows (talk_format.Talk)" in data.report.lines()
    mapped = [{"question": row["q"], "a": row["a"], "system": ""} for row in ROWS]
    assert tokens(prepared(tmp_path, mapped, own.Talk(), column_mapping={"q": "question"})) == tokens(ours)


def test_a_listed_system_text_stands_in_front(own, tmp_path):
    with_system = [turn("system", "Be short."), *messages(ROWS[0])]
    ours = prepared(tmp_path, [{"messages": with_system}], name="ours.jsonl")
    assert tokens(prepared(tmp_path, [{**ROWS[0], "system": "Be short."}], own.Talk())) == tokens(ours)


def test_pairs_and_judged_rows_are_those_of_our_formats(own, tmp_path):
    for kind, rows in (
        (own.Duel, [{"prompt": r["q"], "chosen": r["a"], "rejected": r["b"]} for r in ROWS]),
        (own.Verdict, [{"prompt": r["q"], "completion": r["a"], "label": r["good"]} for r in ROWS]),
    ):
        ours = prepared(tmp_path, rows, name="ours.jsonl", preferences=True)
        data = prepared(tmp_path, ROWS, kind(), preferences=True)
        assert tokens(data) == tokens(ours) and data.train.kind == ours.train.kind


def test_texts_are_trained_whole(own, tmp_path):
    ours = prepared(tmp_path, [{"text": row["a"]} for row in ROWS], name="ours.jsonl")
    assert tokens(prepared(tmp_path, ROWS, own.Page())) == tokens(ours)


def test_prompts_leave_the_answer_out_and_keep_the_row(own, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    config = DataConfig(path=str(path), format=own.Talk(greeting="Hi! "), truncation="drop")
    prompts = prepare_prompts(config, tiny_tokenizer(), seed=0, max_tokens=100)
    assert [p.messages for p in prompts.train.prompts] == [[turn("user", f"Hi! {row['q']}")] for row in ROWS]
    assert [p.row for p in prompts.train.prompts] == ROWS
    assert "rows.jsonl (talk_format.Talk): 2 prompts" in prompts.report.lines()[0]


def test_what_is_no_conversation_is_no_prompt(own, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS)
    config = DataConfig(path=str(path), format=own.NoTurns(), truncation="drop")
    with raises(DataError, "bad_rows", values=("format talk_format.NoTurns", "AnsweredPrompt", "Conversation")):
        prepare_prompts(config, tiny_tokenizer(), seed=0, max_tokens=100)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Peeks", ["rows.jsonl:1", "'q'", "fields are: a"]),
        ("Divides", ["rows.jsonl:2: format talk_format.Divides", "ZeroDivisionError"]),
        ("WrongKind", ["PlainText", "makes=conversations", "Conversation or AnsweredPrompt"]),
        ("NoRole", ["role and text"]),
        ("TrainsTheQuestion", ["trained message"]),
    ],
)
def test_errors_of_a_format_name_the_rows(own, tmp_path, name, values):
    with raises(DataError, "bad_rows", values=values):
        prepared(tmp_path, ROWS, getattr(own, name)())


def test_columns_that_train_and_are_not_listed_are_refused(own, tmp_path):
    with raises(DataError, "bad_rows", values=("column 'tools'", "format talk_format.Talk")):
        prepared(tmp_path, [{**ROWS[0], "tools": [{"name": "x"}]}], own.Talk())


def test_a_format_of_the_other_kind_is_refused_with_the_config(own):
    with raises(ConfigError, "wrong_data_kind", keys=("data.format",), values=("talk_format.Duel",)):
        DataConfig(path="x.jsonl", format=own.Duel()).check_kind("documents")
    with raises(ConfigError, "invalid_choice", keys=("format",), values=("talk_format.MakesNothing.makes='rows'",)):
        DataConfig(path="x.jsonl", format=own.MakesNothing())
    with raises(ConfigError, "unknown_name", keys=("column_mapping",), values=("'question'", "talk_format.Talk")):
        DataConfig(path="x.jsonl", format=own.Talk(), column_mapping={"question": "q"})


def test_an_edited_format_meets_no_stale_cache(own, tmp_path):
    first = prepared(tmp_path, ROWS, own.Talk())
    assert first.report.built and not prepared(tmp_path, ROWS, own.Talk()).report.built
    assert prepared(tmp_path, ROWS, own.Talk(greeting="Hi! ")).report.built, "another value"
    helper = tmp_path / "spoken_words.py"
    (tmp_path / "unrelated.py").write_text("x = 1\n")
    assert not prepared(tmp_path, ROWS, own.Talk()).report.built, "a file that it does not import"
    helper.write_text(helper.read_text().replace("row.text('q')", "row.text('q').upper()"))
    for name in ("spoken_words", "talk_format"):
        del sys.modules[name]
    importlib.invalidate_caches()
    edited = prepared(tmp_path, ROWS, importlib.import_module("talk_format").Talk())
    assert edited.report.built and tokens(edited) != tokens(first), "a module that the format imports"


def test_a_format_travels_to_worker_processes(own):
    assert pickle.loads(pickle.dumps(own.Talk("x"))) == own.Talk("x")
