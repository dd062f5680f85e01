"""nanoGPT's files by hand: both magic numbers, documents that begin or end with a token, and damaged files."""

from __future__ import annotations

import numpy as np
import pytest

from automodel_cli.config.errors import DataError
from automodel_cli.data.token_files import nanogpt
from automodel_cli.data.token_files.detection import is_nanogpt
from tests.errors import raises


def file(path, tokens, *, magic=20240520, version=1, count=None, size=0, dtype=np.uint16):
    header = np.zeros(256, np.int32)
    header[:4] = magic, version, len(tokens) if count is None else count, size
    path.write_bytes(header.tobytes() + np.array(tokens, dtype).tobytes())
    return path


def documents(path, *delimiters):
    made = nanogpt.read(path, delimiters)
    return [made.document(i).tolist() for i in range(len(made.lengths))]


@pytest.mark.parametrize(
    ("tokens", "delimiters", "want"),
    [
        ([0, 5, 6, 0, 7], (0,), [[0, 5, 6], [0, 7]]),  # begins with it
        ([5, 6, 0, 7, 0], (0,), [[5, 6, 0], [7, 0]]),  # ends with it
        ([5, 6, 0, 7], (0,), [[5, 6, 0], [7]]),
        ([5, 6, 7], (0,), [[5, 6, 7]]),
        ([5, 2, 7], (0, 2), [[5, 2], [7]]),  # the first that occurs
        ([0, 0, 5], (0,), [[0], [0, 5]]),
        ([], (0,), []),
    ],
)
def test_documents(tmp_path, tokens, delimiters, want):
    assert documents(file(tmp_path / "a.bin", tokens), *delimiters) == want


@pytest.mark.parametrize(("size", "dtype"), [(2, np.uint16), (4, np.uint32)])
def test_the_other_magic_number_has_a_token_size(tmp_path, size, dtype):
    path = file(tmp_path / "a.bin", [0, 60000], magic=278895051, size=size, dtype=dtype)
    assert is_nanogpt(path) and documents(path, 0) == [[0, 60000]]
    assert nanogpt.token_ids(path).dtype == dtype


def test_documents_longer_than_a_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr(nanogpt, "_CHUNK", 3)
    assert documents(file(tmp_path / "a.bin", [0, 5, 6, 7, 8, 0, 9, 0]), 0) == [[0, 5, 6, 7, 8], [0, 9], [0]]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_what_is_written_is_read(tmp_path, dtype):
    path = tmp_path / "a.bin"
    assert nanogpt.write(path, map(np.array, ([0, 5], [6, 7], [8, 0])), 0, np.dtype(dtype)) == (3, 7)
    assert documents(path, 0) == [[0, 5], [0, 6, 7], [0, 8]]


@pytest.mark.parametrize(
    ("made", "code"),
    [
        ({"count": 4}, "damaged_file"),
        ({"version": 2}, "unsupported_file_type"),
        ({"magic": 278895051, "size": 3}, "unsupported_file_type"),
    ],
)
def test_damaged_files_are_rejected(tmp_path, made, code):
    with raises(DataError, code):
        nanogpt.read(file(tmp_path / "a.bin", [1, 2, 3], **made), (0,))
    (tmp_path / "short.bin").write_bytes(b"abc")
    with raises(DataError, "damaged_file"):
        nanogpt.read(tmp_path / "short.bin", (0,))
