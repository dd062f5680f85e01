"""One pass over the rows of all datasets: a hash, a MinHash signature, words, language and overlap of each row.

A row takes 49 bytes of memory, and `4 * NUM_HASHES` bytes of a temporary file for its signature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from automodel_cli.data.batched import batched
from automodel_cli.data.preparation.preparation_progress import PreparationProgress
from automodel_cli.data.quality.overlap import EvaluationIndex
from automodel_cli.data.quality.row_text import RowText
from automodel_cli.data.quality.words import WordHasher, ngram_hashes
from automodel_cli.data.row_errors import RowError, SourceRow, attempt_each
from automodel_cli.data.sources.sources import ShardedSource, Source
from automodel_cli.data.sources.spans import Span

NUM_HASHES = 128
"""Hashes of a MinHash signature."""
SHINGLE = 5
"""Words of a shingle, of which the Jaccard similarity of two texts is computed."""
UNKNOWN = "unknown"
"""Language of a text whose most likely language has a probability below 0.5."""
_SEED = 1
_BATCH = 256
_LANGUAGE_CHARACTERS = 2000
_COLUMNS: dict[str, np.dtype] = {
    "file": np.dtype(np.int32),
    "line": np.dtype(np.int64),
    "words": np.dtype(np.int32),
    "size": np.dtype(np.int32),
    "language": np.dtype("S8"),
    "unit": np.dtype(np.int32),
    "coverage": np.dtype(np.float32),
}


@dataclass(frozen=True)
class InvalidRow:
    """A row that could not be read: file (index) and line, cause and text."""

    file: int
    line: int
    code: str
    message: str


@dataclass(frozen=True)
class Features:
    """Features of the readable rows of one dataset, or of a part of it.

    Attributes:
        columns: `file`, `line`, `words`, `size` (UTF-8 bytes), `language`, and `unit` with the largest `coverage`
            (-1 for none), each (rows,).
        digest_R2: two halves of the hash of roles and texts, uint64.
        signatures: files of MinHash signatures with their numbers of rows, in order.
        reached: largest coverage of each unit of the evaluations, by its number.
    """

    columns: dict[str, np.ndarray]
    digest_R2: np.ndarray
    signatures: list[tuple[Path, int]]
    invalid: list[InvalidRow]
    reached: dict[int, float]
    num_lines: dict[int, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.digest_R2)


@dataclass(frozen=True)
class FeatureReader:
    """Reads features of rows. Picklable, for worker processes.

    Attributes:
        checks: `near` needs signatures, `language` languages, `overlap` an index.
        folder: of the signatures.
    """

    text: RowText
    checks: frozenset[str]
    index: EvaluationIndex | None
    folder: Path

    def read(self, rows: Iterable[SourceRow], name: str) -> Features:
        """Return the features of these rows. `name`: of the file of their signatures, unique."""
        invalid: list[InvalidRow] = []
        values: dict[str, list[object]] = {column: [] for column in _COLUMNS}
        digests: list[bytes] = []
        reached: dict[int, float] = {}
        signatures = self.folder / f"{name}.u32"
        with signatures.open("wb") as out:
            for batch in batched(self._readable(rows, invalid), _BATCH):
                shingles = []
                for origin, parts in batch:
                    text = "\n".join(text for _, text in parts)
                    words_W = self._words_of(text)
                    digests.append(xxhash.xxh3_128_digest(repr(parts).encode("utf-8", "surrogatepass")))
                    unit, coverage = self._overlap(words_W, reached)
                    size = len(text.encode("utf-8", "surrogatepass"))
                    of_row = (origin.file, origin.line, len(words_W), size, self._language(text), unit, coverage)
                    for column, value in zip(_COLUMNS, of_row, strict=True):
                        values[column].append(value)
                    shingles.append(ngram_hashes(words_W, max(1, min(SHINGLE, len(words_W)))))
                if "near" in self.checks:
                    out.write(_signatures(shingles).tobytes())
        columns = {name: np.array(values[name], dtype) for name, dtype in _COLUMNS.items()}
        digest_R2 = np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2)
        return Features(columns, digest_R2, [(signatures, len(digest_R2))], invalid, reached)

    def _readable(
        self, rows: Iterable[SourceRow], invalid: list[InvalidRow]
    ) -> Iterator[tuple[SourceRow, list[tuple[str, str]]]]:
        for origin in rows:
            (parts,) = attempt_each(self.text.parts, [origin.row])
            if isinstance(parts, RowError):
                invalid.append(InvalidRow(origin.file, origin.line, parts.code, parts.message))
            else:
                yield origin, parts

    @cached_property
    def _words_of(self) -> WordHasher:
        return WordHasher()

    @cached_property
    def _identifier(self) -> Any:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier

        return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)

    def _language(self, text: str) -> str:
        if "language" not in self.checks:
            return ""
        language, probability = self._identifier.classify(text[:_LANGUAGE_CHARACTERS])
        return str(language) if probability >= 0.5 else UNKNOWN

    def _overlap(self, words_W: np.ndarray, reached: dict[int, float]) -> tuple[int, float]:
        if self.index is None:
            return -1, 0.0
        units, coverages = self.index.covered(words_W)
        if not len(units):
            return -1, 0.0
        for unit, coverage in zip(units.tolist(), coverages.tolist(), strict=True):
            reached[unit] = max(coverage, reached.get(unit, 0.0))
        best = int(np.argmax(coverages))
        return int(units[best]), float(coverages[best])


def _signatures(shingles: Sequence[np.ndarray]) -> np.ndarray:
    """Return the MinHash signatures of sets of hashes, uint32 (sets, NUM_HASHES)."""
    from rensa import RMinHash

    bounds = np.cumsum([0, *map(len, shingles)])
    made = RMinHash.digest_matrix_from_flat_token_hashes(np.concatenate(shingles), bounds, NUM_HASHES, _SEED)
    return np.array(made.to_rows(), np.uint32)


def read_features(
    reader: FeatureReader, source: Source, number: int, num_workers: int, show: Callable[[str], None]
) -> Features:
    """Return the features of a dataset, read in shards by this process or by worker processes.

    Args:
        number: of the dataset, for the names of its files.
        show: receives a line every few seconds.
    """
    options = {"doing": "reading", "unit": "words"}
    if not isinstance(source, ShardedSource):
        return reader.read(source.rows(), f"{number:03d}")
    shards = source.shards()
    sizes = [source.num_bytes_of(spans) for spans in shards]
    progress = PreparationProgress(show, source.name, sum(sizes), **options)
    parts = []
    for part, num_bytes in zip(_parts(reader, source, number, shards, num_workers), sizes, strict=True):
        parts.append(part)
        progress.add(num_bytes, int(part.columns["words"].sum()))
    return _joined(parts, len(source.files))


def _parts(
    reader: FeatureReader, source: ShardedSource, number: int, shards: list[list[Span]], num_workers: int
) -> Iterator[Features]:
    work = [(f"{number:03d}-{shard:06d}", spans) for shard, spans in enumerate(shards)]
    if num_workers == 0 or len(work) == 1:
        yield from (_of_shard(reader, source, *of_shard) for of_shard in work)
        return
    with ProcessPoolExecutor(min(num_workers, len(work)), get_context("spawn"), _start, (reader, source)) as pool:
        try:
            yield from pool.map(_in_worker, work)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _of_shard(reader: FeatureReader, source: ShardedSource, name: str, spans: Sequence[Span]) -> Features:
    features = reader.read(source.rows_of(spans), name)
    features.num_lines.update(source.num_lines_of(spans))
    return features


_worker: tuple[FeatureReader, ShardedSource] | None = None


def _start(reader: FeatureReader, source: ShardedSource) -> None:
    global _worker
    _worker = reader, source


def _in_worker(work: tuple[str, list[Span]]) -> Features:
    assert _worker is not None, "the worker was started without its dataset"
    return _of_shard(*_worker, *work)


def _joined(parts: Sequence[Features], num_files: int) -> Features:
    """Join the shards of a dataset. Lines of a file are counted on from shard to shard."""
    shift_F = np.zeros(num_files, np.int64)
    invalid, reached = [], dict[int, float]()
    for part in parts:
        part.columns["line"] += shift_F[part.columns["file"]]
        invalid += [
            InvalidRow(row.file, row.line + int(shift_F[row.file]), row.code, row.message) for row in part.invalid
        ]
        for unit, coverage in part.reached.items():
            reached[unit] = max(coverage, reached.get(unit, 0.0))
        for file, lines in part.num_lines.items():
            shift_F[file] += lines
    columns = {name: np.concatenate([part.columns[name] for part in parts]) for name in _COLUMNS}
    digests = np.concatenate([part.digest_R2 for part in parts])
    return Features(columns, digests, [entry for part in parts for entry in part.signatures], invalid, reached)
