"""Convert datasets between files of rows and token files.

Rows are copied as they are, or the column `text` is tokenized. Tokens are copied, or decoded to rows with one column
`text`.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from automodel_cli.config.errors import DataError
from automodel_cli.data.batched import batched
from automodel_cli.data.json_reader import Row
from automodel_cli.data.row_errors import RowError
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.sources.compressed import plain_name
from automodel_cli.data.sources.file_discovery import SUFFIXES
from automodel_cli.data.sources.sources import Source, TokenSource, open_source
from automodel_cli.data.storage.cache import cache_root
from automodel_cli.data.token_files import megatron, nanogpt
from automodel_cli.data.token_files.detection import INDEX_SUFFIX, SUFFIX
from automodel_cli.data.token_files.reader import open_token_file
from automodel_cli.data.tokenized import encode_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS = (".jsonl", ".parquet", ".arrow")
_BATCH = 1024


@dataclass(frozen=True)
class Converted:
    """Numbers of a conversion. `num_tokens` is None for rows."""

    num_documents: int
    num_tokens: int | None = None


def convert(
    source: SourceConfig,
    target: Path,
    *,
    layout: str,
    tokenizer: Any,
    column: str,
    append_eos: bool,
) -> Converted:
    """Write the dataset `source` as `target`. The target appears when it is complete.

    Args:
        target: its suffix selects rows (`.jsonl`, also `.gz` and `.zst`; `.parquet`, `.arrow`) or tokens (`.bin`). A
            name without a suffix is a folder of `datasets.save_to_disk`.
        layout: `megatron` or `nanogpt`, of token files.
        tokenizer: encodes and decodes texts, and has the token between documents of nanoGPT files. None: not needed.
        column: column of the text.
        append_eos: end each tokenized text with EOS.

    Raises:
        DataError: the target exists or has another suffix, a tokenizer is needed, or a row cannot be read.
    """
    _check_target(target)
    opened = open_source(source, cache_root(None))
    is_tokens = isinstance(opened, TokenSource)
    if tokenizer is None and (is_tokens != (target.suffix == SUFFIX) or layout == "nanogpt"):
        raise DataError(
            "a tokenizer is required to convert between text and tokens, and for the documents of nanoGPT files",
            code="requires_setting",
            keys=("--tokenizer",),
            fix="--tokenizer Qwen/Qwen3-0.6B",
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{os.getpid()}-{target.name}")
    try:
        if target.suffix == SUFFIX:
            documents, dtype = _documents(opened, tokenizer, column, append_eos)
            done = Converted(*_write_tokens(partial, documents, layout, tokenizer, dtype))
        else:
            done = Converted(_write_rows(partial, target, _rows(opened, tokenizer, column)))
        for made in (partial.with_suffix(INDEX_SUFFIX), partial):  # the index first: a `.bin` is complete
            if made.exists():
                made.rename(target if made == partial else target.with_suffix(INDEX_SUFFIX))
    except BaseException:
        for left in (partial, partial.with_suffix(INDEX_SUFFIX)):
            shutil.rmtree(left, ignore_errors=True)
            with suppress(OSError):
                left.unlink()
        raise
    return done


def _check_target(target: Path) -> None:
    if target.exists():
        raise DataError(f"{target} exists already", code="file_exists", fix="name another file")
    plain = plain_name(target)
    compressed = plain != target.name
    if not plain.endswith((*ROWS, SUFFIX)) and (compressed or Path(plain).suffix in {*SUFFIXES, ".idx"}):
        raise DataError(
            f"the suffix of {target} must be one of: {', '.join((*ROWS, SUFFIX))}, or none for a folder",
            code="unsupported_file_type",
            fix=str(target.with_name(f"{plain.split('.')[0]}.jsonl")),
        )
    if compressed and not plain.endswith(".jsonl"):
        raise DataError(
            f"{target} is not supported: only .jsonl is compressed as a whole",
            code="unsupported_file_type",
            fix=str(target.with_name(plain)),
        )


def _checked(source: Source) -> Iterator[Row]:
    """Yield the rows. Raises DataError at the first that cannot be read."""
    for origin in source.rows():
        if isinstance(origin.row, RowError):
            raise DataError(
                f"{source.files[origin.file]}:{origin.line}: {origin.row.message}", code="bad_rows", fix=origin.row.fix
            )
        yield origin.row


def _documents(
    source: Source, tokenizer: PreTrainedTokenizerBase, column: str, append_eos: bool
) -> tuple[Iterable[np.ndarray], np.dtype | None]:
    """Return the tokens of each document, and the dtype of token files."""
    if isinstance(source, TokenSource):
        delimiters = [] if tokenizer is None else nanogpt.delimiters_of(tokenizer)
        files = [open_token_file(path, delimiters) for path in source.paths]
        dtype = np.result_type(*(file.ids.dtype for file in files))
        return (file.document(i) for file in files for i in range(len(file.lengths))), dtype
    end = [tokenizer.eos_token_id] if append_eos and tokenizer.eos_token_id is not None else []
    return _encoded(_checked(source), source.name, tokenizer, column, end), None


def _encoded(
    rows: Iterator[Row], name: str, tokenizer: PreTrainedTokenizerBase, column: str, end: list[int]
) -> Iterator[np.ndarray]:
    for batch in batched(rows, _BATCH):
        texts = [row[column] for row in batch if isinstance(row.get(column), str)]
        if len(texts) < len(batch):
            raise DataError(
                f"{name} has a row without a text in the column {column!r}; its columns are {', '.join(batch[0])}",
                code="missing_column",
                fix="--column <the column of the text>",
            )
        for ids in encode_texts(tokenizer, texts, add_special_tokens=True):
            has_end = end and len(ids) and ids[-1] == end[0]
            yield ids if has_end else np.append(ids, end).astype(ids.dtype)


def _write_tokens(
    path: Path, documents: Iterable[np.ndarray], layout: str, tokenizer: PreTrainedTokenizerBase, dtype: np.dtype | None
) -> tuple[int, int]:
    fits = len(tokenizer) <= 2**16 if dtype is None else dtype.itemsize <= 2
    if layout == "megatron":
        return megatron.write(path, documents, np.dtype("uint16" if fits else "int32"))
    between = nanogpt.delimiters_of(tokenizer)
    if not between:
        raise DataError(
            "nanoGPT files separate documents by the BOS or EOS token, but the tokenizer has neither",
            code="unsupported_combination",
            fix="--to megatron",
        )
    return nanogpt.write(path, documents, between[0], np.dtype("uint16" if fits else "uint32"))


def _rows(source: Source, tokenizer: PreTrainedTokenizerBase, column: str) -> Iterator[Row]:
    if not isinstance(source, TokenSource):
        yield from _checked(source)
        return
    for path in source.paths:
        file = open_token_file(path, nanogpt.delimiters_of(tokenizer))
        for i in range(len(file.lengths)):
            yield {column: tokenizer.decode(file.document(i).tolist(), skip_special_tokens=True)}


def _write_rows(path: Path, target: Path, rows: Iterator[Row]) -> int:
    if plain_name(target).endswith(".jsonl"):
        number = 0
        with create_file(path, target) as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n")
                number += 1
        return number
    if target.suffix in ROWS:
        return _write_table(path, rows, parquet=target.suffix == ".parquet")
    from datasets import Dataset

    table = path.with_name(f"{path.name}.arrow")
    try:
        number = _write_table(table, rows, parquet=False)
        Dataset.from_file(str(table)).save_to_disk(str(path))
    finally:
        table.unlink(missing_ok=True)
    return number


def _write_table(path: Path, rows: Iterator[Row], *, parquet: bool) -> int:
    """Write a parquet file or an Arrow stream. The first rows decide the types of the columns."""
    import pyarrow
    from pyarrow import parquet as parquet_files

    number = 0
    first = list(itertools.islice(rows, _BATCH))
    schema = pyarrow.Table.from_pylist(first).schema
    with parquet_files.ParquetWriter(path, schema) if parquet else pyarrow.ipc.new_stream(path, schema) as writer:
        batch = first
        while batch:
            try:
                writer.write_table(pyarrow.Table.from_pylist(batch, schema))
            except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
                raise DataError(
                    f"rows {number + 1:,} to {number + len(batch):,} have other types than the first rows: {error}",
                    code="bad_rows",
                    fix="a target that ends in .jsonl",
                ) from error
            number += len(batch)
            batch = list(itertools.islice(rows, _BATCH))
    return number


def create_file(path: Path, target: Path) -> IO[bytes]:
    """Open `path` for writing, compressed by the suffix of `target`."""
    if target.suffix not in (".gz", ".zst"):
        return path.open("wb")
    import pyarrow

    out: IO[bytes] = pyarrow.output_stream(str(path), compression={".gz": "gzip", ".zst": "zstd"}[target.suffix])
    return out
