"""Rows with preferences: every shape read, what is refused and why, and pairs that no packer takes apart."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.data.config import DataConfig
from automodel_cli.data.preparation.inspect_rows import show_rows
from automodel_cli.data.preparation.packed_rows import DUMMY_ROW
from automodel_cli.data.preparation.pipeline import prepare_data
from tests.errors import raises
from tests.unit.data.helpers import tiny_tokenizer, turn, write_jsonl

QUESTION, GOOD, BAD = "what is it", "the answer is seven", "no"
USER, RIGHT, WRONG = turn("user", QUESTION), turn("assistant", GOOD), turn("assistant", BAD)
EARLIER = [turn("user", "hello"), turn("assistant", "hi")]
SHAPES = {
    "texts": {"prompt": QUESTION, "chosen": GOOD, "rejected": BAD},
    "responses as messages": {"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]},
    "whole conversations": {"prompt": QUESTION, "chosen": [USER, RIGHT], "rejected": [USER, WRONG]},
    "sharegpt": {
        "conversations": [{"from": "human", "value": QUESTION}],
        "chosen": {"from": "gpt", "value": GOOD},
        "rejected": {"from": "gpt", "value": BAD},
    },
    "messages before": {"messages": [USER], "chosen": RIGHT, "rejected": WRONG},
}


def data(tmp_path, rows, **options) -> DataConfig:
    path = write_jsonl(tmp_path / "pairs.jsonl", rows)
    options = {"seq_len": 192, "truncation": "drop", **options}
    return DataConfig(path=str(path), cache_dir=str(tmp_path / "cache"), **options)


def prepared(config, tokenizer=None):
    return prepare_data(config, tokenizer or tiny_tokenizer(), seed=0, preferences=True)


def documents_of(dataset, tokenizer, row):
    """(text, trained text) of each document of a packed row."""
    ids, mask, bounds = dataset.tokens(row)
    found = []
    for a, b in itertools.pairwise(bounds.tolist()):
        trained = [int(ids[i + 1]) for i in range(a, b - 1) if mask[i]]
        found.append((tokenizer.decode(ids[a:b].tolist()), tokenizer.decode(trained)))
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_the_same_pair(tmp_path, shape):
    tokenizer = tiny_tokenizer()
    train = prepared(data(tmp_path, [SHAPES[shape]]), tokenizer).train
    (chosen, chosen_trained), (rejected, rejected_trained) = documents_of(train, tokenizer, 0)
    prompt = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    assert chosen == f"{prompt}{GOOD}<|im_end|>\n" and rejected == f"{prompt}{BAD}<|im_end|>\n"
    assert (chosen_trained, rejected_trained) == (GOOD + "<|im_end|>", BAD + "<|im_end|>")


def test_earlier_turns_are_prompt(tmp_path):
    tokenizer = tiny_tokenizer()
    rows = [{"chosen": [*EARLIER, USER, RIGHT], "rejected": [*EARLIER, USER, WRONG]}]
    (_, chosen), (_, rejected) = documents_of(prepared(data(tmp_path, rows), tokenizer).train, tokenizer, 0)
    assert (chosen, rejected) == (GOOD + "<|im_end|>", BAD + "<|im_end|>")


def test_without_a_template_prompt_and_response_follow_each_other(tmp_path):
    tokenizer = tiny_tokenizer(None)
    config = data(tmp_path, [{"prompt": "a small text:", "chosen": " yes", "rejected": " no"}])
    (chosen, said), (_, other) = documents_of(prepared(config, tokenizer).train, tokenizer, 0)
    assert chosen == "a small text: yes<|im_end|>" and (said, other) == (" yes<|im_end|>", " no<|im_end|>")


def pairs(count):
    return [
        {"prompt": f"what is {i}", "chosen": "seven " * (1 + i % 4), "rejected": "no " * (1 + i % 3)}
        for i in range(count)
    ]


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_pairs_stay_in_one_row_whatever_the_packing(tmp_path, packing):
    train = prepared(data(tmp_path, pairs(40), packing=packing)).train
    lines = []
    for row in range(len(train)):
        of_row = [line for _, line in train.documents(row)]
        assert of_row[::2] == of_row[1::2] and train.roles(row).tolist() == [1, 0] * (len(of_row) // 2)
        lines += of_row[::2]
    assert sorted(lines) == list(range(1, 41))
    assert (len(train) < 40) == (packing == "best_fit")


def test_pair_columns_of_a_batch_name_the_documents(tmp_path):
    tokenizer = tiny_tokenizer()
    train = prepared(data(tmp_path, pairs(12)), tokenizer).train
    batch = train.collate([0, DUMMY_ROW, 1])
    assert len(batch.extra["pairs_P2"]) == sum(len(train.documents(row)) // 2 for row in (0, 1))
    ids, trained = batch.input_ids_BT.flatten(), (batch.labels_BT != IGNORE_INDEX).flatten()
    for chosen, rejected in batch.extra["pairs_P2"].tolist():
        spans = [slice(*batch.cu_seqlens[d : d + 2].tolist()) for d in (chosen, rejected)]
        texts = [tokenizer.decode(ids[span]) for span in spans]
        assert (
            "seven" in texts[0]
            and "no" in texts[1]
            and texts[0].split("assistant")[0] == texts[1].split("assistant")[0]
        )
        assert all(trained[span].any() and not trained[span][-1] for span in spans)
    assert torch.equal(batch.document_ids_BT.flatten().bincount(), batch.cu_seqlens.diff().long())


def test_judged_responses_come_with_an_answer_to_another_prompt(tmp_path):
    tokenizer = tiny_tokenizer()
    rows = [{"prompt": f"what is {i}", "completion": f"it is {i}", "label": i % 2 == 0} for i in range(4)]
    train = prepared(data(tmp_path, rows, packing="none"), tokenizer).train
    batch = train.collate([0, 1])
    padding = batch.num_documents - 4
    assert [r for r in batch.extra["desirable_S"].tolist() if r >= 0] == [1, 0]
    assert batch.extra["desirable_S"].tolist().count(-1) == 2 + padding
    (own, _), (other, said) = documents_of(train, tokenizer, 0)
    assert "what is 0" in own and "it is 0" in own
    assert "what is 0" in other and said == "it is 1<|im_end|>"


@pytest.mark.parametrize("kind", ["pairs", "responses"])
def test_a_row_counts_its_pairs_or_responses(tmp_path, kind):
    column = "pairs_P2" if kind == "pairs" else "desirable_S"
    judged = [{"prompt": f"what is {i}", "completion": f"it is {i}", "label": i % 2 == 0} for i in range(6)]
    train = prepared(data(tmp_path, [SHAPES["texts"]] * 6 if kind == "pairs" else judged)).train
    extra = train.collate(range(len(train))).extra
    number = len(extra[column]) if kind == "pairs" else int((extra[column] >= 0).sum())
    assert number == 6 and len(train) < 6
    assert train.units_per_row() == (kind, pytest.approx(number / len(train)))


def test_judged_conversations_end_with_the_response(tmp_path):
    tokenizer = tiny_tokenizer()
    rows = [{"messages": [*EARLIER, USER, RIGHT], "kto_tag": True}, {"messages": [USER, WRONG], "kto_tag": False}]
    config = data(tmp_path, rows, packing="none", column_mapping={"label": "kto_tag"})
    (_, said), _ = documents_of(prepared(config, tokenizer).train, tokenizer, 0)
    assert said == GOOD + "<|im_end|>"


BAD_ROWS = [
    ({"prompt": QUESTION, "chosen": GOOD, "rejected": GOOD}, "chosen and rejected are identical"),
    ({"prompt": QUESTION, "chosen": GOOD, "rejected": ""}, "rejected is empty"),
    ({"prompt": QUESTION, "chosen": GOOD, "rejected": 3}, "rejected is int, not a list of messages"),
    ({"other": 1, "chosen": GOOD, "rejected": BAD}, "prompt is missing"),
    ({"chosen": [USER, RIGHT], "rejected": [WRONG]}, "one of chosen and rejected is a conversation"),
    ({"chosen": [USER, RIGHT], "rejected": [turn("user", "else"), WRONG]}, "do not begin with the same message"),
    ({"chosen": [USER, RIGHT], "rejected": [USER]}, "a prefix of the other"),
    ({"prompt": "else", "chosen": [USER, RIGHT], "rejected": [USER, WRONG]}, "prompt is not one of the messages"),
    ({"prompt": QUESTION, "completion": GOOD, "label": "good"}, "label is 'good'"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS, ids=[reason for _, reason in BAD_ROWS])
def test_bad_row_is_named_by_file_and_line(tmp_path, row, reason):
    good = {**SHAPES["texts"]} if "chosen" in row else {"prompt": QUESTION, "completion": GOOD, "label": True}
    if "other" in row:
        good["other"] = 1
    with raises(DataError, "bad_rows", values=("pairs.jsonl:2", reason)):
        prepared(data(tmp_path, [good, row]))


def test_no_preferences_in_the_columns(tmp_path):
    with raises(DataError, "unknown_format", keys=("data.column_mapping",), values=("messages",)):
        prepared(data(tmp_path, [{"messages": [USER, RIGHT]}]))


def test_pairs_longer_than_a_row_are_dropped_or_named(tmp_path):
    rows = [*pairs(3), {"prompt": QUESTION, "chosen": "seven " * 200, "rejected": "no"}]
    report = prepared(data(tmp_path, rows)).report
    assert report.train[0].long.num_documents == 1
    with raises(DataError, "sequence_length", keys=("data.truncation",)) as caught:
        prepared(data(tmp_path, rows, truncation="error"))
    assert "truncation=drop" in caught.value.fix


@pytest.mark.parametrize(
    ("options", "code", "key"),
    [
        ({"packing": "wrapped", "truncation": "split"}, "unsupported_combination", "packing"),
        ({"truncation": "truncate"}, "unsupported_combination", "truncation"),
        ({"loss_mask": "all"}, "unsupported_combination", "loss_mask"),
        ({"format": "alpaca"}, "wrong_data_kind", "format"),
    ],
)
def test_settings_that_split_pairs_are_rejected(tmp_path, options, code, key):
    with raises(ConfigError, code, keys=(f"data.{key}",), values=(f"{key}={options[key]}",)):
        data(tmp_path, pairs(2), **options).check_kind("preferences")


def test_a_format_of_pairs_is_refused_where_plain_rows_are_trained(tmp_path):
    with raises(ConfigError, "wrong_data_kind", keys=("data.format",), values=("format=preference",)):
        prepare_data(data(tmp_path, pairs(2), format="preference"), tiny_tokenizer(), seed=0)


def test_inspection_names_the_roles(tmp_path, capsys):
    config = replace(data(tmp_path, pairs(4)), packing="none")
    show_rows(prepared(config), tiny_tokenizer(), rows=1, console=Console(width=200, highlight=False))
    printed = capsys.readouterr().out
    assert "document 1 (chosen)" in printed and "document 2 (rejected)" in printed
