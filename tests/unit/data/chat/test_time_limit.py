"""Data and templates that would take all time or memory: they are ended with an error that names them."""

from __future__ import annotations

import gzip
import threading
import time
from pathlib import Path

import pytest

from automodel_cli.config.errors import DataError
from automodel_cli.data import json_array, json_reader
from automodel_cli.data.chat import chat_template, renderer
from automodel_cli.data.chat.encoder import ChatEncoder
from automodel_cli.data.chat.time_limit import time_limit
from automodel_cli.data.formats.examples import Conversation
from automodel_cli.data.row_errors import RowError
from automodel_cli.data.sources import file_readers
from automodel_cli.data.sources.file_readers import read_file
from automodel_cli.models.tokenizer import ByteTokenizer
from tests.errors import raises

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = j %}{% endfor %}{% endfor %}"
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def test_a_template_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "RENDER_SECONDS", 0.2)
    began = time.monotonic()
    with raises(DataError, "timeout", values=("chat template",)) as error:
        ChatEncoder(ByteTokenizer().build(), ENDLESS, "all", turns="single").encode([Conversation(MESSAGES, [True])])
    assert time.monotonic() - began < 30 and error.value.fix == renderer.RENDER_FIX


def test_a_template_that_does_not_end_is_not_asked_for_its_like(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.2)
    with raises(DataError, "timeout"):
        list(chat_template._renderings(ByteTokenizer().build(), ENDLESS))


def test_a_limit_ends_its_own_thread_alone() -> None:
    found: list[str] = []

    def other() -> None:
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            pass
        found.append("went on")

    thread = threading.Thread(target=other)
    thread.start()
    with raises(DataError, "timeout"), time_limit(0.1, "it", "try"):
        while True:
            pass
    with time_limit(60, "it", "try"), time_limit(0.0, "it", "try"):
        time.sleep(1.2)  # within a limit another one changes nothing
    thread.join()
    assert found == ["went on"]


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.json.gz", "x.csv.gz", "x.jsonl", "x.csv"])
def test_a_row_larger_than_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A few kB of gzip that hold one row of 8 MiB, with room for 1 MiB."""
    for module in (json_array, json_reader, file_readers):
        monkeypatch.setattr(module, "MAX_ROW", 1 << 20)
    row = b'{"text": "' + b"a" * (8 << 20) + b'"}'
    content = {"jsonl": row, "json": b"[" + row + b"]", "csv": b"text\n" + b"a" * (8 << 20)}[name.split(".")[1]]
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with raises(DataError, "limit_exceeded", values=("1 MiB",)):
        list(read_file(path))


def test_parquet_of_very_little_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "x.parquet"
    table = pyarrow.table({"text": ["a" * (8 << 20)]})
    pyarrow.parquet.write_table(table, path, compression="zstd", use_dictionary=False)
    assert path.stat().st_size < 1 << 16
    assert len(list(read_file(path))) == 1
    monkeypatch.setattr(file_readers, "_MAX_GROUP", 1 << 20)
    with raises(DataError, "limit_exceeded", values=("row group 0",)):
        list(read_file(path))


def test_rows_of_ordinary_files_are_what_they_were(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n\n{"a": 2}')
    (tmp_path / "x.csv").write_bytes(b'a,b\r\n1,"2\n3"\r\n')
    assert [row for _, row in read_file(tmp_path / "x.jsonl")] == [{"a": 1}, {"a": 2}]
    assert [row for _, row in read_file(tmp_path / "x.csv")] == [{"a": "1", "b": "2\n3"}]
    assert not any(isinstance(row, RowError) for _, row in read_file(tmp_path / "x.csv"))
