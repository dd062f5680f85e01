"""Files of a streamed dataset: which there are, how each is identified, and the rows of a part of one."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from automodel_cli.config.errors import DataError
from automodel_cli.data.json_reader import NumberedRow
from automodel_cli.data.row_errors import DAMAGED, SourceRow, is_damaged
from automodel_cli.data.source_config import SourceConfig, TxtRows
from automodel_cli.data.sources import spans
from automodel_cli.data.sources.file_discovery import local_files, remote_files
from automodel_cli.data.sources.file_readers import hub_files
from automodel_cli.data.sources.remote_files import is_url, listed
from automodel_cli.data.sources.remote_path import RemotePath
from automodel_cli.data.sources.sources import refuse_tokens
from automodel_cli.data.sources.spans import Span, is_divisible, read_span
from automodel_cli.data.token_files.detection import are_token_files

_ENDS = 64 << 10
_MANY = 8
"""With this many shards a lane, lanes need not have equally many."""


@dataclass(frozen=True)
class KnownFile:
    """A file of the dataset: its path, its bytes, and a text that changes with its content."""

    name: str
    size: int
    tag: str


@dataclass(frozen=True)
class Shard:
    """A part of a file that one lane reads: the rows of a span, or every `parts`-th of them from row `part` on."""

    span: Span
    part: int = 0
    parts: int = 1


def plan_shards(files: Sequence[KnownFile], text_unit: TxtRows, num_lanes: int) -> list[Shard]:
    """Return the shards of files that became known together. With few shards, every lane has equally many.

    Files with one row per line are divided at line breaks. Of other files, lanes read different rows.
    """
    sizes = [(spans.SHARD_BYTES if is_divisible(Path(f.name), text_unit) else max(1, f.size)) for f in files]
    number = sum(max(1, math.ceil(file.size / size)) for file, size in zip(files, sizes, strict=True))
    parts = num_lanes // math.gcd(number, num_lanes) if number < _MANY * num_lanes else 1
    shards = []
    for index, (file, size) in enumerate(zip(files, sizes, strict=True)):
        if not is_divisible(Path(file.name), text_unit):
            shards += [Shard(Span(index), part, parts) for part in range(parts)]
            continue
        count = parts * max(1, math.ceil(file.size / size))
        bounds = [file.size * i // count for i in range(count + 1)]
        shards += [Shard(Span(index, a, b)) for a, b in itertools.pairwise(bounds)]
    return shards


class StreamSource:
    """A dataset whose files are read in place. `files` are those that exist now."""

    grows = True
    """Files that are new at a resume are read."""

    def __init__(self, config: SourceConfig):
        self.config, self.text_unit = config, config.text_unit
        paths = _paths(config)
        if are_token_files(paths):
            raise refuse_tokens(config.path)
        self._paths = {_name(path): path for path in paths}
        self.known = [_known(path) for path in paths]
        self.groups = [self.known]
        self.name = paths[0].name if len(paths) == 1 else config.path
        self.files = [path.name for path in paths]
        self.num_bytes = sum(file.size for file in self.known)
        self.is_remote = isinstance(paths[0], RemotePath)
        self.note = ""

    def ingredients(self) -> dict[str, object]:
        """Empty: the state of the run contains the files."""
        return {}

    def describe(self) -> str:
        """Return how many files there are."""
        return "1 file" if len(self.files) == 1 else f"{len(self.files):,} files"

    def path(self, name: str) -> Path:
        """Return the file of this name, which may have been listed by another process."""
        if name in self._paths:
            return self._paths[name]
        first = next(iter(self._paths.values()))
        return RemotePath.of(first.fs, name) if isinstance(first, RemotePath) else Path(name)

    def rows(self) -> Iterator[SourceRow]:
        """Yield rows of all files in order, without damaged ones, for a sample."""
        for number, path in enumerate(self._paths.values()):
            try:
                for line, row in read_span(path, self.text_unit, Span(number)):
                    if not is_damaged(row):
                        yield SourceRow(number, line, row)
            except DataError as error:
                if error.code != DAMAGED:
                    raise

    def rows_of(self, name: str, shard: Shard) -> Iterator[NumberedRow]:
        """Yield the rows of a shard, each with its line. The last row of a damaged file is a RowError."""
        for number, (line, row) in enumerate(read_span(self.path(name), self.text_unit, shard.span)):
            if number % shard.parts == shard.part or is_damaged(row):
                yield line, row

    def close(self) -> None:
        """Nothing: it does not wait."""


def place_of(name: str, shard: Shard) -> str:
    """Return the name of a file for messages. Lines of a span are counted from its first byte."""
    return Path(name).name + (f"@{shard.span.begin}" if shard.span.begin else "")


def _paths(config: SourceConfig) -> list[Path]:
    if is_url(config.path):
        found, is_folder = listed(config.path)
        by_name = {Path(path.key): path for path in found}
        chosen = remote_files(config.path, list(by_name), config.split, is_folder=is_folder, whole=False)
        return [by_name[path] for path in chosen]
    paths = local_files(config.path, config.split)
    if paths is not None:
        return paths
    urls = hub_files(config)
    return [path for url in urls for path in (listed(url)[0] if is_url(url) else [Path(url)])]


def _name(path: Path) -> str:
    return path.key if isinstance(path, RemotePath) else str(path)


def _known(path: Path) -> KnownFile:
    """Identify a remote file by what the storage reports, and a local one by its size, its begin and its end."""
    if isinstance(path, RemotePath):
        about = path.fs.info(path.key)
        return KnownFile(path.key, int(about["size"]), str(about.get("ETag") or path.fs.ukey(path.key)))
    size = path.stat().st_size
    with path.open("rb") as file:
        ends = file.read(_ENDS)
        file.seek(max(0, size - _ENDS))
        ends += file.read(_ENDS)
    return KnownFile(str(path), size, hashlib.sha256(ends).hexdigest()[:16])
