"""Megatron's datasets: files that megatron-core wrote, token by token, files of ours read by it, and damaged files."""

from __future__ import annotations

import runpy
import struct
from pathlib import Path

import numpy as np
import pytest

from automodel_cli.config.errors import DataError
from automodel_cli.data.token_files import megatron
from tests.errors import raises

VECTORS = Path(__file__).parents[3] / "vectors" / "megatron"
MADE = runpy.run_path(str(VECTORS / "write.py"))
DOCUMENTS, DTYPES, tokens = MADE["DOCUMENTS"], MADE["DTYPES"], MADE["tokens"]


def documents(path: Path) -> list[list[int]]:
    file = megatron.read(path)
    return [file.document(i).tolist() for i in range(len(file.lengths))]


@pytest.mark.parametrize("name", DTYPES)
def test_documents_that_megatron_wrote(name):
    path = VECTORS / f"{name}_text_document.bin"
    assert documents(path) == [tokens(i) for i in range(len(DOCUMENTS))]
    assert megatron.read(path).ids.dtype == megatron.token_ids(path).dtype == name


def test_files_that_megatron_writes_and_reads_here(tmp_path):
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    MADE["write"](tmp_path)
    for name in DTYPES:
        path = tmp_path / f"{name}_text_document.bin"
        assert path.read_bytes() == (VECTORS / path.name).read_bytes()
        megatron.write(tmp_path / "ours.bin", map(np.array, documents(path)), np.dtype(name))
        theirs = indexed.IndexedDataset(str(tmp_path / "ours"))
        assert [ids.tolist() for ids in theirs[:]] == [tokens(i) for i in range(len(DOCUMENTS))]


def test_ours_has_the_bytes_of_megatron(tmp_path):
    """Documents of one sequence: header, lengths, first bytes and bounds as in the module's docstring."""
    assert megatron.write(tmp_path / "a.bin", [np.array([7, 8]), np.array([9])], np.dtype("uint16")) == (2, 3)
    want = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ2i2q3q", 1, 8, 2, 3, 2, 1, 0, 4, 0, 1, 2)
    assert (tmp_path / "a.idx").read_bytes() == want
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<3H", 7, 8, 9)


def test_empty_documents_are_left_out(tmp_path):
    megatron.write(tmp_path / "a.bin", [np.array([7]), np.zeros(0), np.array([8])], np.dtype("int32"))
    assert documents(tmp_path / "a.bin") == [[7], [8]]
    megatron.write(tmp_path / "b.bin", [], np.dtype("int32"))
    assert documents(tmp_path / "b.bin") == []


def index(**changes) -> bytes:
    """An index of 3 documents of 2 tokens, uint16."""
    fields = {"version": 1, "code": 8, "lengths": [2, 2, 2], "firsts": [0, 4, 8], "bounds": [0, 1, 2, 3], **changes}
    sizes = len(fields["lengths"]), len(fields["bounds"])
    arrays = [np.array(fields["lengths"], np.int32), np.array(fields["firsts"]), np.array(fields["bounds"])]
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", fields["version"], fields["code"], *sizes)
    return head + b"".join(array.tobytes() for array in arrays)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "damaged_file"),
        (b"other" * 9, "damaged_file"),
        (index()[:-1], "damaged_file"),
        (index() + b"1", "damaged_file"),
        (index() + b"\0\0\0", "unsupported_file_type"),  # modes: multimodal
        (index(version=2), "unsupported_file_type"),
        (index(code=7), "unsupported_file_type"),
        (index(lengths=[2, 2, 3]), "damaged_file"),  # one token more than the file
        (index(firsts=[0, 8, 4], bounds=[0, 2, 3, 3]), "damaged_file"),  # a document in two places
        (index(bounds=[0, 1, 2]), "damaged_file"),
        (index(bounds=[0, 2, 1, 3]), "damaged_file"),
    ],
)
def test_damaged_files_are_rejected(tmp_path, content, code):
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(12))
    path.with_suffix(".idx").write_bytes(content)
    with raises(DataError, code):
        megatron.read(path)


def test_half_a_token_is_rejected(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(13))
    (tmp_path / "a.idx").write_bytes(index())
    with raises(DataError, "damaged_file", values=("13",)):
        megatron.read(tmp_path / "a.bin")
