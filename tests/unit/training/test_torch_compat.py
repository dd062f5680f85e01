"""A checkpoint from anybody: real ones are read as torch reads them, and nothing in a hostile one is executed."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from automodel_cli.config.errors import RunError
from automodel_cli.training.torch_compat import CheckpointReader
from tests.errors import raises

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn)


def state() -> dict[str, torch.Tensor]:
    return {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    dcp.save(state(), storage_writer=FileSystemWriter(tmp_path), no_dist=True)
    return tmp_path


def test_a_real_checkpoint_is_read_as_torch_reads_it(folder: Path) -> None:
    ours, theirs = CheckpointReader(folder).read_metadata(), FileSystemReader(folder).read_metadata()
    assert ours.state_dict_metadata == theirs.state_dict_metadata and ours.storage_data == theirs.storage_data
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state().items()}
    dcp.load(loaded, storage_reader=CheckpointReader(folder), no_dist=True)
    assert all(loaded[name].tolist() == tensor.tolist() for name, tensor in state().items())


class Runs:
    """What a pickle of it does when it is loaded."""

    def __init__(self, function: Any, *arguments: Any):
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def touch(path: str) -> None:
    Path(path).touch()


def rewrite(folder: Path, change: Any) -> Metadata:
    metadata = FileSystemReader(folder).read_metadata()
    (folder / ".metadata").write_bytes(pickle.dumps(change(metadata)))
    return metadata


def test_metadata_that_runs_something_is_refused_and_nothing_ran(folder: Path) -> None:
    marker = folder / "ran"

    def attack(metadata: Metadata) -> Metadata:
        metadata.planner_data = Runs(touch, str(marker))
        return metadata

    rewrite(folder, attack)
    FileSystemReader(folder).read_metadata()
    assert marker.exists(), "torch's own reader runs it"
    marker.unlink()
    with raises(RunError, "unsafe_file", keys=("checkpoint.resume",), values=(f"{__name__}.touch",)):
        CheckpointReader(folder).read_metadata()
    with pytest.raises(BaseException, match=f"{__name__}.touch"):
        dcp.load(state(), storage_reader=CheckpointReader(folder), no_dist=True)
    assert not marker.exists()


@pytest.mark.parametrize(
    "call",
    [(eval, "1"), (getattr, "", "upper"), (torch.load, "x"), (__import__, "os"), (Path.unlink, "x")],
    ids=lambda call: call[0].__name__,
)
def test_whatever_is_no_description_of_a_tensor_is_refused(folder: Path, call: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(*call)))
    with raises(RunError, "unsafe_file"):
        CheckpointReader(folder).read_metadata()


def test_an_entry_that_torch_would_unpickle_is_refused(folder: Path) -> None:
    """An entry of bytes under a tensor's name: torch decides by the file how to read it, and unpickles it all."""
    marker = folder / "ran"
    payload = folder / "payload"
    torch.save(Runs(touch, str(marker)), payload)

    def attack(metadata: Metadata) -> Metadata:
        name = next(iter(metadata.state_dict_metadata))
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        index = next(i for i in metadata.storage_data if i.fqn == name)
        place = metadata.storage_data.pop(index)
        place.relative_path, place.offset, place.length = "payload", 0, payload.stat().st_size
        metadata.storage_data[type(index)(name)] = place
        return metadata

    rewrite(folder, attack)
    dcp.load(state(), storage_reader=FileSystemReader(folder), no_dist=True)
    assert marker.exists(), "torch's own reader runs it"
    marker.unlink()
    with raises(RunError, "unsafe_file"):
        CheckpointReader(folder).read_metadata()
    assert not marker.exists()


def test_a_shard_outside_the_folder_is_refused(folder: Path) -> None:
    def attack(metadata: Metadata) -> Metadata:
        for place in metadata.storage_data.values():
            place.relative_path = "../elsewhere"
        return metadata

    rewrite(folder, attack)
    with raises(RunError, "unsafe_file", values=("outside",)):
        CheckpointReader(folder).read_metadata()


def test_a_pickle_cannot_change_the_classes_that_it_may_name(folder: Path) -> None:
    before = dict(vars(Metadata))
    name = b"torch.distributed.checkpoint.metadata\nMetadata\n"
    # GLOBAL Metadata; BUILD with (None, {"version": "mine"}): setattr on the class itself
    (folder / ".metadata").write_bytes(b"c" + name + b"(N(V" + b"version\nVmine\ndtb.")
    with raises(RunError, "unsafe_file"):
        CheckpointReader(folder).read_metadata()
    assert dict(vars(Metadata)) == before


@pytest.mark.parametrize("content", [b"", b"\x80", b"not a pickle", pickle.dumps({"a": 1})])
def test_damaged_metadata_is_an_error_with_the_file(folder: Path, content: bytes) -> None:
    (folder / ".metadata").write_bytes(content)
    with raises(RunError, "unsafe_file", values=(folder / ".metadata",)):
        CheckpointReader(folder).read_metadata()
