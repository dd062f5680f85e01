"""Labeled rows: the tokens of `tokenizer(text)`, targets of every kind, and what is refused and why."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.encoding.labeled import LabeledEncoder, padding_id
from automodel_cli.data.formats.examples import LabeledText
from automodel_cli.data.formats.labeled import LabeledTexts
from automodel_cli.data.labels import LabelSpec
from automodel_cli.data.preparation.inspect_rows import show_rows
from automodel_cli.data.preparation.packed_rows import DUMMY_ROW
from automodel_cli.data.preparation.pipeline import prepare_data
from automodel_cli.data.row_errors import RowError
from tests.errors import raises
from tests.unit.data.helpers import tiny_tokenizer, write_jsonl

SINGLE = LabelSpec("single_label_classification", ("bad", "good"))
MULTI = LabelSpec("multi_label_classification", ("red", "green", "blue"))
NUMBER = LabelSpec("regression", ("score",))
TAGS = LabelSpec("single_label_classification", ("O", "NAME"), of_tokens=True)


def data(tmp_path, rows, **options) -> DataConfig:
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    return DataConfig(path=str(path), cache_dir=str(tmp_path / "cache"), **{"seq_len": 64, **options})


def prepared(tmp_path, rows, labels, **options):
    return prepare_data(data(tmp_path, rows, **options), tiny_tokenizer(), seed=0, row_spec=labels).train


def targets_of(batch) -> list[object]:
    (column,) = batch.extra.values()
    return [tuple(target) if isinstance(target, list) else target for target in column.tolist()]


def test_documents_have_the_tokens_of_the_tokenizer_and_their_own_targets(tmp_path):
    texts = ["the answer is seven", "no", "what is it"]
    rows = [{"text": t, "label": label} for t, label in zip(texts, ["good", 0, True], strict=True)]
    train, tokenizer = prepared(tmp_path, rows, SINGLE), tiny_tokenizer()
    batch = train.collate([0, DUMMY_ROW])
    ids, bounds = train.tokens(0)[0], train.tokens(0)[2]
    found = {tuple(ids[a:b].tolist()) for a, b in itertools.pairwise(bounds)}
    assert found == {tuple(tokenizer(text)["input_ids"]) for text in texts}
    by_text = dict(zip(texts, [1, 0, 1], strict=True))
    order = [by_text[texts[line - 1]] for _, line in train.documents(0)]
    assert batch.extra["class_ids_S"].tolist() == [*order, -1, -1]  # padding of both rows
    assert batch.extra["class_ids_S"].dtype == torch.int64


@pytest.mark.parametrize(
    ("labels", "value", "target"),
    [
        (MULTI, ["blue", "red"], (1.0, 0.0, 1.0)),
        (MULTI, [1], (0.0, 1.0, 0.0)),
        (MULTI, [], (0.0, 0.0, 0.0)),
        (MULTI, {"green": True, "blue": False}, (0.0, 1.0, 0.0)),
        (MULTI, [True, False, True], (1.0, 0.0, 1.0)),
        (NUMBER, 2, (2.0,)),
        (NUMBER, [2.5], (2.5,)),
        (LabelSpec("single_label_classification", ("5", "1")), 1, (1.0,)),  # a name before an index
    ],
)
def test_targets(labels, value, target):
    assert labels.target(value, "label") == target


@pytest.mark.parametrize(
    ("labels", "value", "code", "words"),
    [
        (SINGLE, "god", "unknown_label", ("'god'", "'good'")),
        (SINGLE, 2, "label_out_of_range", (2,)),
        (SINGLE, -1, "label_out_of_range", (-1,)),
        (MULTI, "red", "bad_label", ("'red'",)),
        (MULTI, [0, 1, 1], "bad_label", ("[0, 1, 1]",)),
        (NUMBER, "5", "bad_label", ("'5'",)),
        (NUMBER, float("nan"), "bad_label", ("nan",)),
        pytest.param(NUMBER, 10**400, "bad_label", (), id="beyond-float"),
        (NUMBER, [1.0, 2.0], "bad_label", (2,)),
    ],
)
def test_other_labels_are_refused_with_their_value(labels, value, code, words):
    with raises(RowError, code, values=("label", *words)):
        labels.target(value, "label")


def refused(tmp_path: Path, rows, labels) -> str:
    """The code of the one row that is refused."""
    with raises(DataError, "bad_rows", values=(f"rows.jsonl:{len(rows)}",)):
        prepared(tmp_path, rows, labels)
    (rejected,) = {path.read_text() for path in tmp_path.glob("cache/**/rejected.jsonl") if path.stat().st_size}
    for path in tmp_path.glob("cache/**/rejected.jsonl"):
        path.unlink()
    return json.loads(rejected)["code"]


def test_a_refused_label_is_located(tmp_path):
    assert refused(tmp_path, [{"text": "yes", "label": 1}, {"text": "no", "label": "god"}], SINGLE) == "unknown_label"


@pytest.mark.parametrize(
    ("row", "fix"),
    [
        ({"text": "yes", "lable": 1}, "{text: text, label: lable}"),
        ({"sentence": "yes", "sentiment": 1}, "{text: sentence, label: sentiment}"),
        ({"content": "yes", "labels": 1}, "{text: content, label: labels}"),
    ],
)
def test_a_missing_column_is_answered_with_a_close_one(tmp_path, row, fix):
    with raises(DataError, "unknown_format", keys=("data.column_mapping",), fix=f"data.column_mapping='{fix}'"):
        prepared(tmp_path, [row, row], SINGLE)


def test_pairs_of_texts_follow_the_template(tmp_path):
    rows = [{"text": "what is it", "text_pair": "no", "label": 1}]
    train = prepared(tmp_path, rows, SINGLE, format=LabeledTexts(pair_template="{text} -> {text_pair}"))
    assert train.tokens(0)[0].tolist() == tiny_tokenizer()("what is it -> no")["input_ids"]
    with raises(ConfigError, "invalid_value", keys=("pair_template",)):
        LabeledTexts(pair_template="{text}")


def test_a_long_text_is_cut_and_keeps_its_label(tmp_path):
    rows = [{"text": "what is it " * 40, "label": "good"}]
    train = prepared(tmp_path, rows, SINGLE)
    assert len(train.tokens(0)[0]) == 64 and targets_of(train.collate([0]))[0] == 1
    with raises(ConfigError, "unsupported_combination", keys=("data.truncation",)):
        data(tmp_path, rows, truncation="split").check_kind("labeled")
    with raises(ConfigError, "wrong_data_kind", keys=("data.format",)):
        data(tmp_path, rows, format="messages").check_kind("labeled")


def test_a_text_that_ends_with_padding_is_refused(tmp_path):
    tokenizer = tiny_tokenizer()
    pad = tokenizer.convert_ids_to_tokens(padding_id(tokenizer))
    assert refused(tmp_path, [{"text": f"yes{pad}", "label": 1}], SINGLE) == "ends_with_padding"


def test_every_token_of_a_word_has_the_tag_of_the_word(tmp_path):
    tokenizer = tiny_tokenizer()
    train = prepared(tmp_path, [{"tokens": ["call", "Zoe", "now"], "tags": ["O", "NAME", 0]}], TAGS)
    (classes_T,) = train.collate([0]).extra["class_ids_BT"][:, : len(train.tokens(0)[0])].tolist()
    named = [i for i, c in zip(train.tokens(0)[0].tolist(), classes_T, strict=True) if c == 1]
    assert tokenizer.decode(named).strip() == "Zoe"
    assert refused(tmp_path, [{"tokens": ["call", "Zoe"], "tags": ["O"]}], TAGS) == "bad_label"
    assert refused(tmp_path, [{"tokens": ["call", "Zoe"], "tags": ["O", "NAM"]}], TAGS) == "unknown_label"


def test_words_of_an_own_format_may_be_a_list():
    encoder = LabeledEncoder(tiny_tokenizer(), TAGS, add_special_tokens=True)
    words, tags = ("call", "Zoe"), ["O", "NAME"]
    of_tuple, of_list = encoder.encode([LabeledText(words, tags), LabeledText(list(words), tags)])
    assert of_list.classes.tolist() == of_tuple.classes.tolist()


def test_inspection_prints_the_labels(tmp_path, capsys):
    rows = [{"text": "yes", "label": ["blue", "red"]}, {"text": "no", "label": []}]
    prepared_data = prepare_data(data(tmp_path, rows), tiny_tokenizer(), seed=0, row_spec=MULTI)
    show_rows(prepared_data, tiny_tokenizer(), rows=1, console=Console(width=200, highlight=False))
    text = capsys.readouterr().out
    assert "red, blue" in text and "no label" in text
