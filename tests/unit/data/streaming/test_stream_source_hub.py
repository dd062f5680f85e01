"""Streams of hub datasets without network: the library resolves the files of the split, which are read in place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pytest

from automodel_cli.config.errors import DataError
from automodel_cli.data.streaming.streamed_data import open_streams
from automodel_cli.models.tokenizer import ByteTokenizer
from tests.errors import raises
from tests.unit.data.streaming.test_stream_loader import config, loader, rows, saved, texts


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset repository in memory, which the library's own builder resolves."""
    folder = tmp_path / "rows"
    folder.mkdir()
    memory = fsspec.filesystem("memory")
    for number in range(3):
        lines = "".join(json.dumps(row) + "\n" for row in rows(20 * number, 20))
        (folder / f"train-{number}.jsonl").write_text(lines)
        memory.pipe(f"/hub/train-{number}.jsonl", lines.encode())
    memory.pipe("/hub/test-0.jsonl", b'{"text": "held out"}\n')
    resolve = datasets.load_dataset_builder

    def of_the_hub(path: str, name: Any, *, revision: Any) -> Any:
        assert (path, name, revision) == ("org/rows", None, None)
        files = {split: f"memory://hub/{split}-*.jsonl" for split in ("train", "test")}
        return resolve("json", data_files=files, cache_dir=str(tmp_path / "datasets"))

    monkeypatch.setattr(datasets, "load_dataset_builder", of_the_hub)
    monkeypatch.chdir(tmp_path)
    yield folder
    memory.rm("/hub", recursive=True)


def test_a_hub_dataset_has_the_sequences_of_its_files(repository: Path) -> None:
    hub = config("org/rows")
    one = loader(hub)
    assert [Path(file.name).name for file in one.dataset.streams[0].source.known] == [
        f"train-{number}.jsonl" for number in range(3)
    ]
    found = texts([one], 4)
    state = saved([one])
    found += texts([one], 6)
    assert found == texts([loader(config(repository))], 10)
    assert texts([loader(hub, rank, 2) for rank in range(2)], 10) == found
    resumed = loader(hub)
    resumed.load_state_dict(state)
    assert texts([resumed], 6) == found[4:]
    assert not list((repository.parent / "datasets").rglob("*.arrow")), "nothing is downloaded"


def test_a_hub_dataset_without_the_split_or_the_network(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(DataError, "server_rejected"):
        open_streams(config("org/rows", split="dev"), ByteTokenizer().build())
    monkeypatch.undo()
    with raises(DataError, "missing_file", keys=("data.path",)):
        open_streams(config("org/other-rows"), ByteTokenizer().build())
