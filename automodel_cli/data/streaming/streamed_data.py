"""A streamed dataset as a run sees it before the first step: its files, a sample of its rows, and its report."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from automodel_cli.config.errors import DataError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.preparation.dataset import PackedDataset
from automodel_cli.data.preparation.parts import check_rows
from automodel_cli.data.preparation.pipeline import DataBuilder
from automodel_cli.data.preparation.statistics import DataReport
from automodel_cli.data.preparation.token_writer import TokenWriter
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.storage.memmap_store import PackedStore
from automodel_cli.data.streaming.blocks import BlockBuilder
from automodel_cli.data.streaming.lane_reader import START, Chunk
from automodel_cli.data.streaming.prepared_source import PreparedSource, StoredDocuments
from automodel_cli.data.streaming.stream_source import StreamSource

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAMPLE_ROWS = 256


@dataclass(frozen=True)
class Stream:
    """One dataset: its files, what encodes its rows, and the hash of all settings that determine its sequences."""

    source: StreamSource | PreparedSource
    builder: BlockBuilder
    settings: str


class StreamedDataset:
    """The training data of a streamed run. Lengths and statistics are those of a sample, the first rows."""

    pictures = None

    def __init__(self, config: DataConfig, streams: Sequence[Stream], sample: PackedDataset):
        self.config, self.streams, self.sample = config, list(streams), sample
        self.mixture = sample.mixture
        self.check_store: Callable[[PackedStore], None] = lambda store: None
        """Called with every block. Raises for token ids without an embedding."""
        self.describe: Callable[[int], str] = lambda row: f"sequence {row} of the stream"

    @property
    def pad_id(self) -> int:
        """Token of padding."""
        return self.sample.pad_id

    @pad_id.setter
    def pad_id(self, value: int) -> None:
        self.sample.pad_id = value

    @property
    def contents(self) -> list[tuple[str, str]]:
        """Name, and hash of the settings, of every dataset."""
        return [(stream.source.name, stream.settings) for stream in self.streams]

    def __len__(self) -> int:
        return len(self.sample)

    def tokens(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See `PackedDataset.tokens`: of the sample."""
        return self.sample.tokens(row)

    def statistics(self) -> list[dict[str, object]]:
        """Statistics of the sample."""
        return [{**of, "name": f"{of['name']} (first rows)"} for of in self.sample.statistics()]

    def units_per_row(self) -> tuple[str, float]:
        """See `PackedDataset.units_per_row`: of the sample."""
        return self.sample.units_per_row()

    def taught_stops(self) -> list[int]:
        """Stop tokens of the sample."""
        return self.sample.taught_stops()

    def mean_context(self) -> float:
        """Mean length of the document of a token of the sample."""
        return self.sample.mean_context()

    def with_stores(self, stores: Sequence[PackedStore], sources: Sequence[int]) -> PackedDataset:
        """Return blocks as a dataset that collates."""
        like = self.sample
        return PackedDataset(
            stores,
            self.mixture,
            sources=sources,
            pad_id=like.pad_id,
            row_len=like.row_len,
            pad_to_multiple_of=like.pad_to_multiple_of,
            cross_documents=like.cross_documents,
        )


@dataclass(frozen=True)
class StreamReport:
    """What is known of the data before the run."""

    rows: list[str]
    validation: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return the lines of the startup summary."""
        return [*self.rows, *self.validation, "read while the run trains"]


@dataclass(frozen=True)
class StreamedData:
    """Data of a run: the stream, prepared validation sequences, and the report."""

    train: StreamedDataset
    validation: PackedDataset | None
    report: StreamReport


def open_streams(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, stop_ids: Sequence[int] = ()
) -> StreamedData:
    """List the files, read a sample of the rows, and prepare the validation data. Needs no process group."""
    config.check_kind("documents")
    own = copy.deepcopy(tokenizer)  # threads encode while the run uses its tokenizer
    builder = DataBuilder(config, own, "documents", tuple(stop_ids), _show, None, None)
    streams = [_stream(config, builder, source) for source in config.train_sources()]
    samples = [_sample(stream) for stream in streams]
    pairs = enumerate(zip(streams, samples, strict=True))
    lines = [line for number, (stream, store) in pairs for line in _lines(config, stream, store, number)]
    train = StreamedDataset(config, streams, builder.dataset(samples, range(len(samples))))
    parts = builder.validation_parts()
    if not parts:
        return StreamedData(train, None, StreamReport(lines))
    check_rows(config, parts)
    packed = [builder.packed(part) for part in parts]
    validation = builder.dataset([store for store, _ in packed], [-1] * len(packed))
    report = DataReport([], [report for _, report in packed]).lines()[:-1]
    return StreamedData(train, validation, StreamReport(lines, report))


def _show(line: str) -> None:
    print(line, file=sys.stderr)


def _stream(config: DataConfig, builder: DataBuilder, of: SourceConfig) -> Stream:
    source: StreamSource | PreparedSource
    if config.start_after is None:
        source = StreamSource(of)
        writer = builder.writer(source, of)
    else:
        source = PreparedSource(builder.kept_shards(of), config.start_after)
        encoder = StoredDocuments(builder.tokenizer)
        writer = TokenWriter(encoder, source.name, {}, (), source.meta, builder.special_ids())
    blocks = BlockBuilder(writer, config)
    settings = {
        **builder.settings(of),
        "packing": [config.packing, config.seq_len, config.truncation, config.cross_documents],
        "text_unit": of.text_unit,
    }
    text = json.dumps(settings, sort_keys=True, default=str)
    return Stream(source, blocks, hashlib.sha256(text.encode()).hexdigest()[:32])


def _sample(stream: Stream) -> PackedStore:
    rows = list(itertools.islice(stream.source.rows(), _SAMPLE_ROWS))
    block = stream.builder.build(Chunk(START, rows, list(stream.source.files)))
    if block.store is None or not block.num_sequences:
        raise DataError(
            f"none of the first {len(rows):,} rows of {stream.source.name} can be used", code="not_enough_rows"
        )
    return block.store


def _lines(config: DataConfig, stream: Stream, sample: PackedStore, number: int) -> list[str]:
    source, meta = stream.source, stream.builder.writer.meta
    use = config.mixture().describe(number) if config.datasets else ""
    size = _size(source.num_bytes)
    out = [f"{source.name}: streamed, {source.describe()}, {size} ({meta['format']})" + (use and f", {use}")]
    if meta["unused"]:
        out.append(f"  columns without effect: {', '.join(meta['unused'])}")
    fill = int(sample.offsets[-1]) / (config.seq_len * sample.num_rows)
    packed = f"packed {config.packing}, {100 * fill:.1f}% full in the first rows"
    return [*out, f"  loss mask: {meta['masked_by']}; {packed}"]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"
