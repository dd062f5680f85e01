"""Datasets converted in a circle, and conversions that are rejected."""

from __future__ import annotations

import json

import numpy as np
import pytest

from automodel_cli.config.errors import DataError
from automodel_cli.data.conversion import convert
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.sources.sources import open_source
from automodel_cli.data.token_files import megatron, nanogpt
from tests.errors import raises
from tests.unit.data.helpers import tiny_tokenizer, write_jsonl

ROWS = [{"text": f"document {i} of words", "n": i, "tags": ["a", "b"][: i % 3]} for i in range(1500)]
EOS = tiny_tokenizer().eos_token_id


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOMODEL_CACHE", str(tmp_path / "cache"))


def run(source, target, *, tokenizer=None, layout="megatron", column="text", append_eos=True):
    options = {"layout": layout, "tokenizer": tokenizer, "column": column, "append_eos": append_eos}
    return convert(SourceConfig(str(source)), target, **options)


def rows(path) -> list[dict]:
    return [json.loads(json.dumps(origin.row)) for origin in open_source(SourceConfig(str(path)), path.parent).rows()]


def test_rows_survive_a_circle_of_all_formats(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    for name in ("b.parquet", "c.arrow", "d.jsonl.zst", "saved", "e.jsonl.gz", "f.jsonl"):
        assert run(path, tmp_path / name).num_documents == 1500
        path = tmp_path / name
        assert rows(path) == ROWS
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


def documents(file) -> list[list[int]]:
    return [file.document(i).tolist() for i in range(len(file.lengths))]


def test_texts_become_tokens_and_texts_again(tmp_path):
    path, tokenizer = write_jsonl(tmp_path / "a.jsonl", ROWS[:20]), tiny_tokenizer()
    want = [[*tokenizer(row["text"])["input_ids"], EOS] for row in ROWS[:20]]
    done = run(path, tmp_path / "m.bin", tokenizer=tokenizer)
    assert (done.num_documents, done.num_tokens) == (20, sum(map(len, want)))
    assert documents(megatron.read(tmp_path / "m.bin")) == want
    run(tmp_path / "m.bin", tmp_path / "n.bin", tokenizer=tokenizer, layout="nanogpt")
    bos = tokenizer.bos_token_id
    assert documents(nanogpt.read(tmp_path / "n.bin", [bos])) == [[bos, *one] for one in want]
    run(tmp_path / "n.bin", tmp_path / "back.bin", tokenizer=tokenizer)
    run(tmp_path / "back.bin", tmp_path / "texts.jsonl", tokenizer=tokenizer)
    assert rows(tmp_path / "texts.jsonl") == [{"text": row["text"]} for row in ROWS[:20]]
    run(tmp_path / "m.bin", tmp_path / "copy.bin")  # from tokens to tokens without a tokenizer
    assert (tmp_path / "copy.bin").read_bytes() == (tmp_path / "m.bin").read_bytes()
    assert (tmp_path / "copy.idx").read_bytes() == (tmp_path / "m.idx").read_bytes()


def test_options_of_texts(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"body": "x y"}])
    run(path, tmp_path / "m.bin", tokenizer=tiny_tokenizer(adds_bos=True), column="body", append_eos=False)
    tokenizer = tiny_tokenizer()
    want = [tokenizer.bos_token_id, *tokenizer("x y")["input_ids"]]
    assert documents(megatron.read(tmp_path / "m.bin")) == [want]


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("a.csv", "unsupported_file_type"),
        ("a.parquet.gz", "unsupported_file_type"),
        ("x.idx", "unsupported_file_type"),
        ("rows.jsonl", "file_exists"),
        ("x.bin", "requires_setting"),
    ],
)
def test_what_cannot_be_written_is_rejected(tmp_path, target, code):
    path = write_jsonl(tmp_path / "rows.jsonl", ROWS[:2])
    with raises(DataError, code):
        run(path, tmp_path / target)
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


def test_failed_conversions_leave_nothing(tmp_path):
    mixed = write_jsonl(tmp_path / "rows.jsonl", [*ROWS, {"text": 3, "n": "x"}])
    for target, code in (("a.parquet", "bad_rows"), ("saved", "bad_rows"), ("m.bin", "missing_column")):
        with raises(DataError, code):
            run(mixed, tmp_path / target, tokenizer=tiny_tokenizer())
    broken = write_jsonl(tmp_path / "broken.jsonl", [ROWS[0], "{"])
    with raises(DataError, "bad_rows", values=("broken.jsonl:2",)):
        run(broken, tmp_path / "b.jsonl")
    nanogpt.write(tmp_path / "n.bin", [np.array([1, 2])], 0, np.dtype("uint16"))
    with raises(DataError, "requires_setting"):
        run(tmp_path / "n.bin", tmp_path / "rows.parquet")
    assert {file.name for file in tmp_path.iterdir()} == {"rows.jsonl", "broken.jsonl", "n.bin"}
