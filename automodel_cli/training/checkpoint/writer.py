"""Checkpoint writer of torch that hashes files while writing them, without a second pass over the bytes.

The CRC-32 that torch writes into its zip records is disabled, because no reader verifies it. Measured on one core with
1 GiB of fp32 in memory: 0.80 s with CRC-32, 0.48 s with XXH3-128 of complete files instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.serialization import get_crc32_options, set_crc32_options

from automodel_cli.data.storage.checksums import Checksum
from automodel_cli.training.checkpoint.directory import FileNote


def write_state(
    state: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None
) -> dict[str, FileNote] | None:
    """Write `state` into the empty `folder`. Collective.

    Returns:
        Size and hash of every file on rank 0, None on other ranks.

    Raises:
        CheckpointException: on all ranks. It is a BaseException, not an Exception.
    """
    hashing = _HashingFileSystem()
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    writer.fs = hashing
    with _without_crc32():
        dcp.save(dict(state), storage_writer=writer, process_group=group, no_dist=group is None)
    if group is None:
        return hashing.notes
    of_ranks: list[dict[str, FileNote]] | None = [{}] * dist.get_world_size(group) if dist.get_rank() == 0 else None
    dist.gather_object(hashing.notes, of_ranks, dst=0, group=group)
    return None if of_ranks is None else {name: note for notes in of_ranks for name, note in notes.items()}


@contextmanager
def _without_crc32() -> Iterator[None]:
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


class _HashingFileSystem(FileSystem):
    """Local file system. `notes` contains size and hash of the written files."""

    def __init__(self) -> None:
        self.notes: dict[str, FileNote] = {}

    @contextmanager
    def create_stream(self, path: str | PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            if mode == "rb":
                yield stream
                return
            hashed = _HashedStream(stream)
            try:
                yield hashed
            except RuntimeError as error:  # the zip writer of torch hides the OSError
                if hashed.error is not None:
                    raise hashed.error from error
                raise
            self.notes[Path(path).name] = {"bytes": hashed.num_bytes, "xxh3": hashed.checksum.hexdigest()}

    def rename(self, path: str | PathLike[str], new_path: str | PathLike[str]) -> None:
        super().rename(path, new_path)
        self.notes[Path(new_path).name] = self.notes.pop(Path(path).name)


class _HashedStream:
    """Sequentially written file with a running hash."""

    def __init__(self, stream: Any):
        self._stream = stream
        self.num_bytes, self.checksum = 0, Checksum()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        self.checksum.update(data)
        self.num_bytes += len(data)
        try:
            written: int = self._stream.write(data)
        except OSError as error:
            self.error = error
            raise
        return written

    def tell(self) -> int:
        return self.num_bytes

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        number: int = self._stream.fileno()
        return number

    def close(self) -> None:
        self._stream.close()
