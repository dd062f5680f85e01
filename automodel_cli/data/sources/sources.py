"""Origins of rows: local files, a hub dataset or a generator node, each with the key of its content."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from automodel_cli.config.errors import DataError
from automodel_cli.data.data_sources import DatasetGenerator
from automodel_cli.data.row_errors import RowError, SourceRow
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.sources.file_discovery import left_out, local_files, remote_files
from automodel_cli.data.sources.file_readers import load_hub, read_file, read_hub
from automodel_cli.data.sources.remote_files import fetch, is_url
from automodel_cli.data.sources.spans import Span, num_lines, plan_rows, plan_shards, read_span, span_bytes
from automodel_cli.data.storage.cache import file_hash
from automodel_cli.data.token_files.detection import INDEX_SUFFIX, are_token_files, has_index


class Source(Protocol):
    """A dataset to read: its name for messages, the files that `SourceRow.file` counts, and its rows."""

    name: str
    files: list[str]
    num_bytes: int
    note: str
    """Additional text for the report, or ""."""

    def ingredients(self) -> dict[str, object]:
        """Return everything that identifies the content, for the cache key."""

    def rows(self) -> Iterator[SourceRow]:
        """Yield every row in order. `SourceRow.row` is a RowError if the row could not be parsed."""


def open_source(config: SourceConfig, root: Path, *, whole: bool = False) -> Source:
    """Open the local files or the hub dataset in `config.path`. `whole`: see `local_files`. Raises DataError if neither
    exists.
    """
    if is_url(config.path):
        fetched, is_folder = fetch(config.path, root)
        paths: list[Path] | None = remote_files(config.path, fetched, config.split, is_folder=is_folder, whole=whole)
    else:
        paths = local_files(config.path, config.split, whole=whole)
    if paths is None:
        return HubSource(config)
    stray = next((key for key in ("name", "revision") if getattr(config, key) is not None), None)
    if stray is not None:
        raise DataError(
            f"{stray}={getattr(config, stray)} applies only to hub datasets, but {config.path} is a local path",
            code="no_effect",
            keys=(f"data.{stray}",),
            fix=f"remove data.{stray}",
        )
    return TokenSource(config, paths, root) if are_token_files(paths) else FileSource(config, paths, root)


def first_rows(source: Source, number: int = 16) -> list[dict[str, Any]]:
    """Return the first readable rows, for format detection."""
    readable = (origin.row for origin in source.rows() if not isinstance(origin.row, RowError))
    return list(itertools.islice(readable, number))


def refuse_tokens(path: str) -> DataError:
    """Return the error for token files in a streamed run."""
    return DataError(
        f"{path} has tokens, which are read in place without data.streaming",
        code="no_effect",
        keys=("data.streaming",),
        fix="data.streaming=null data.start_after=null",
    )


class FileSource:
    """One or more local files."""

    def __init__(self, config: SourceConfig, paths: list[Path], root: Path):
        self.paths, self.root = paths, root
        self.text_unit = config.text_unit
        self.name = paths[0].name if len(paths) == 1 and paths[0].name == Path(config.path).name else config.path
        self.files = [path.name for path in paths]
        self.num_bytes = sum(path.stat().st_size for path in paths)
        others = left_out(config.path, paths)
        self.note = f"split {config.split}: {', '.join(self.files)}; left out: {', '.join(others)}" if others else ""

    def ingredients(self) -> dict[str, object]:
        """Includes file names, because messages about rows contain them."""
        hashes = [[path.name, file_hash(path, self.root)] for path in self.paths]
        return {"files": hashes, "text_unit": self.text_unit}

    def shards(self) -> list[list[Span]]:
        """Return the parts that processes read on their own."""
        return plan_shards(self.paths, self.text_unit)

    def rows_of(self, spans: Sequence[Span]) -> Iterator[SourceRow]:
        """Rows of one part, numbered from the first line of each span."""
        for span in spans:
            for line, row in read_span(self.paths[span.file], self.text_unit, span):
                yield SourceRow(span.file, line, row)

    def num_bytes_of(self, spans: Sequence[Span]) -> int:
        """Return the size of a part."""
        return span_bytes(self.paths, spans)

    def num_lines_of(self, spans: Sequence[Span]) -> dict[int, int]:
        """Return by file the lines of a part, by which the lines of the next one are counted on."""
        return {span.file: num_lines(self.paths[span.file], span) for span in spans}

    def rows(self) -> Iterator[SourceRow]:
        """Rows of all files, numbered per file."""
        for number, path in enumerate(self.paths):
            for line, row in read_file(path, self.text_unit):
                yield SourceRow(number, line, row)


class TokenSource:
    """One or more token files. They have documents, but no rows."""

    def __init__(self, config: SourceConfig, paths: list[Path], root: Path):
        if config.format != "auto" or config.column_mapping:
            key = "column_mapping" if config.column_mapping else "format"
            raise DataError(
                f"{key} has no effect on {config.path}, which has tokens instead of rows",
                code="no_effect",
                keys=(f"data.{key}",),
                fix=f"remove data.{key}",
            )
        self.paths, self.root = paths, root
        self.name = paths[0].name if len(paths) == 1 else config.path
        self.files = [path.name for path in paths]
        self.num_bytes = sum(path.stat().st_size for path in paths)
        self.note = ""

    def ingredients(self) -> dict[str, object]:
        """Name and hash of every file, with its index."""
        parts = [[path, path.with_suffix(INDEX_SUFFIX)] if has_index(path) else [path] for path in self.paths]
        return {"tokens": [[[part.name, file_hash(part, self.root)] for part in of] for of in parts]}

    def rows(self) -> Iterator[SourceRow]:
        """Raise DataError."""
        raise DataError(
            f"{self.name} has tokens instead of rows, which only recipes on plain text can train on",
            code="wrong_data_kind",
            keys=("data.path",),
            fix="data.path=<a file of rows>",
        )


class HubSource:
    """A dataset of the hub. Its cached files carry the revision's hash in their names, which identifies the content."""

    def __init__(self, config: SourceConfig):
        self.config = config
        self.dataset = load_hub(config)
        self.name = f"{config.path}/{config.split}"
        self.files = [self.name]
        self.num_bytes = int(self.dataset.data.nbytes)
        self.note = ""

    def ingredients(self) -> dict[str, object]:
        """Use the cached files instead of a request to the hub, so that a node without network gets the same key.

        The last folders of their paths are the builder's configuration and the hash of its code and data files.
        """
        cached = [Path(entry["filename"]).parts[-4:] for entry in self.dataset.cache_files]
        config = self.config
        return {"hub": [config.path, config.name, config.revision, config.split, len(self.dataset), cached]}

    def shards(self) -> list[list[Span]]:
        """Return ranges of rows."""
        return plan_rows(len(self.dataset), self.num_bytes)

    def num_bytes_of(self, spans: Sequence[Span]) -> int:
        """Return the mean size of such parts."""
        num_rows = sum((span.end or 0) - span.begin for span in spans)
        return self.num_bytes * num_rows // max(1, len(self.dataset))

    def num_lines_of(self, spans: Sequence[Span]) -> dict[int, int]:
        """Return no lines, because rows have the same number in every part."""
        return {}

    def rows_of(self, spans: Sequence[Span]) -> Iterator[SourceRow]:
        """Rows of one part, numbered as in the dataset."""
        for span in spans:
            for line, row in read_hub(self.dataset.select(range(span.begin, span.end or 0))):
                yield SourceRow(0, line + span.begin, row)

    def rows(self) -> Iterator[SourceRow]:
        """Rows numbered from 1."""
        return (SourceRow(0, line, row) for line, row in read_hub(self.dataset))


@dataclass
class TaskSource:
    """One split of a task node."""

    task: DatasetGenerator
    split: Literal["train", "validation"]

    def __post_init__(self) -> None:
        self.name = f"{type(self.task).__name__}/{self.split}"
        self.files = [self.name]
        self.num_bytes = 0
        self.note = ""

    def ingredients(self) -> dict[str, object]:
        """The node's own key."""
        return {"task": self.task.cache_key(), "split": self.split}

    def rows(self) -> Iterator[SourceRow]:
        """Rows numbered from 1."""
        return (SourceRow(0, line, row) for line, row in enumerate(self.task.rows(self.split), 1))


ShardedSource = FileSource | HubSource
"""Sources that are read in parts."""
