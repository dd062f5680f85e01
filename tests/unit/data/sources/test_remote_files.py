"""Data on object storage: a file system in memory, and an S3 server where moto and s3fs are installed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import fsspec
import numpy as np
import pyarrow
import pytest
from datasets import Dataset

from automodel_cli.config.errors import DataError
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.sources.file_discovery import local_files
from automodel_cli.data.sources.remote_files import is_url
from automodel_cli.data.sources.sources import TokenSource, open_source
from automodel_cli.data.token_files import megatron
from tests.errors import raises
from tests.object_storage import s3_bucket

ROWS = [{"text": f"row {i}"} for i in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_bucket(monkeypatch) as bucket:
        yield f"{bucket}/data"


@pytest.fixture
def memory() -> Iterator[str]:
    yield "memory://data"
    fsspec.filesystem("memory").rm("/data", recursive=True)


@pytest.fixture(params=["memory", "s3"])
def url(request) -> str:
    return request.getfixturevalue(request.param)


def rows(path: str, root, **options) -> list[dict]:
    return [dict(origin.row) for origin in open_source(SourceConfig(path, **options), root).rows()]


def put(url: str, content: bytes) -> None:
    fs, path = fsspec.core.url_to_fs(url)
    fs.pipe_file(path, content)
    fs.invalidate_cache()


def test_files_folders_and_globs_are_downloaded_once(url, tmp_path, capsys):
    put(f"{url}/a.jsonl", LINES)
    put(f"{url}/b.jsonl.zst", pyarrow.Codec("zstd").compress(LINES, asbytes=True))
    put(f"{url}/README.md", b"about")
    assert rows(f"{url}/a.jsonl", tmp_path) == ROWS == rows(f"{url}/b.jsonl.zst", tmp_path)
    assert rows(url, tmp_path) == rows(f"{url}/*.jsonl*", tmp_path) == ROWS * 2
    assert capsys.readouterr().err.count("downloading") == 4
    assert rows(url, tmp_path) == ROWS * 2
    assert "downloading" not in capsys.readouterr().err
    put(f"{url}/a.jsonl", LINES + LINES)
    assert len(rows(url, tmp_path)) == 9


def test_splits_token_files_and_saved_datasets(url, tmp_path):
    put(f"{url}/s/train-0.jsonl", LINES)
    put(f"{url}/s/test-0.jsonl", LINES[: LINES.index(b"\n") + 1])
    assert rows(f"{url}/s", tmp_path, split="test") == ROWS[:1] and rows(f"{url}/s", tmp_path) == ROWS
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    for file in (tmp_path / "saved").iterdir():
        put(f"{url}/saved/{file.name}", file.read_bytes())
    assert rows(f"{url}/saved", tmp_path) == ROWS
    megatron.write(tmp_path / "t.bin", [np.array([1, 2]), np.array([3])], np.dtype("uint16"))
    for suffix in (".bin", ".idx"):
        put(f"{url}/t{suffix}", (tmp_path / f"t{suffix}").read_bytes())
    for name in ("t", "t.bin", "t.idx", "*.bin"):
        source = open_source(SourceConfig(f"{url}/{name}"), tmp_path)
        assert isinstance(source, TokenSource) and megatron.read(source.paths[0]).lengths.tolist() == [2, 1]


def test_what_is_missing_is_named(url, tmp_path):
    with raises(DataError, "missing_file", values=("none.jsonl",)):
        rows(f"{url}/none.jsonl", tmp_path)
    put(f"{url}/a/x.jsonl", LINES)
    put(f"{url}/b/x.jsonl", LINES)
    with raises(DataError, "ambiguous", values=("x.jsonl",)):
        rows(f"{url}/*/x.jsonl", tmp_path)


def test_unknown_file_systems_are_rejected_without_the_network():
    assert is_url("s3://b/x") and not is_url("org/name") and not is_url("/a:/b") and not is_url("c:/rows.jsonl")
    assert local_files("memory://x/rows.jsonl") is None
    with raises(DataError, "invalid_value", keys=("data.path",)):
        local_files("nothing://x/rows.jsonl")


def test_a_refused_request_is_reported(memory, tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError("Forbidden")

    put(f"{memory}/x.jsonl", LINES)
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "get_file", refuse)
    with raises(DataError, "server_rejected", keys=("data.path",), values=("Forbidden",)):
        rows(f"{memory}/x.jsonl", tmp_path)
