"""Zstandard files: read as plain ones, and up to the damage."""

from __future__ import annotations

import json

import pyarrow
import pytest

from automodel_cli.data.row_errors import RowError
from automodel_cli.data.sources.file_readers import read_file

LINES = "".join(json.dumps({"text": f"row {i} {i * i}"}) + "\n" for i in range(50_000)).encode()


def compressed(path, content: bytes):
    with pyarrow.CompressedOutputStream(str(path), "zstd") as out:
        out.write(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "want"),
    [
        ("a.jsonl.zst", b'{"a": 1}\n{"a": 2}\n', [{"a": 1}, {"a": 2}]),
        ("a.json.zst", b' [{"a": 1}, {"a": 2}]', [{"a": 1}, {"a": 2}]),
        ("a.csv.zst", b"a;b\n1;2\n", [{"a": "1", "b": "2"}]),
        ("a.txt.zst", b"one\n", [{"text": "one\n"}]),
    ],
)
def test_each_text_format(tmp_path, name, content, want):
    assert [row for _, row in read_file(compressed(tmp_path / name, content))] == want


def test_a_cut_file_is_read_up_to_the_cut(tmp_path):
    path = compressed(tmp_path / "a.jsonl.zst", LINES)
    assert sum(1 for _ in read_file(path)) == 50_000
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    rows = [row for _, row in read_file(path)]
    assert 0 < len(rows) < 50_000 and isinstance(rows[-1], RowError)
    assert rows[-1].code == "damaged_file" and "zstd -t" in rows[-1].fix
