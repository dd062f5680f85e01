"""Files and hub datasets as numbered rows. A row that cannot be parsed is an item of the stream, not the end of it."""

from __future__ import annotations

import codecs
import csv
import io
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from automodel_cli.config.composition import hub
from automodel_cli.config.errors import DataError
from automodel_cli.data.json_array import read_array
from automodel_cli.data.json_reader import MAX_ROW, NumberedRow, Row, read_lines, too_long
from automodel_cli.data.row_errors import DAMAGED, RowError, TableRow
from automodel_cli.data.source_config import SourceConfig, TxtRows
from automodel_cli.data.sources.compressed import DAMAGE, open_file, plain_name, tool_of
from automodel_cli.data.sources.remote_path import RemotePath, arrow_source
from automodel_cli.data.sources.text_reader import read_text

DELIMITERS = (";", "\t", "|")
MAX_HEADER = 1 << 20
"""Characters of a header's line that are looked at."""
_MAX_GROUP, _MAX_RATIO = 4 << 30, 200
"""Bytes of a group of parquet rows that are always read, and how many times its packed bytes a larger one may have."""

__all__ = ["NumberedRow", "Row", "load_hub", "read_file", "read_hub"]


def read_file(path: Path, text_unit: TxtRows = "file") -> Iterator[NumberedRow]:
    """The rows of one local file with their 1-based numbers: the line in jsonl and text, the record in other forms.

    The last row of a damaged file is a `DAMAGED` error, because the rest cannot be read.
    """
    name = plain_name(path)
    if name.endswith(".parquet"):
        return _read_parquet(path)
    if name.endswith(".arrow"):
        return _read_arrow(path)
    refuse_wide_characters(path)
    if name.endswith(".csv"):
        return _until_damaged(path, _read_csv(path))
    if name.endswith(".txt"):
        return _until_damaged(path, _from_binary(path, lambda file: read_text(file, path, text_unit)))
    return _until_damaged(path, _from_binary(path, lambda file: _read_json(path, file)))


def refuse_wide_characters(path: Path) -> None:
    """Raise DataError for UTF-16 or UTF-32 text, detected by its byte order mark or by zero bytes at its start."""
    try:
        with open_file(path) as file:
            head = file.read(4)
    except (OSError, *DAMAGE):  # damaged: its reader reports the position
        return
    zeros = tuple(byte == 0 for byte in head)
    if head[:4] in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE):
        encoding = "UTF-32"
    elif head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        encoding = "UTF-16"
    elif zeros in ((False, True, False, True), (True, False, True, False)):
        encoding = "UTF-16LE" if zeros[1] else "UTF-16BE"
    else:
        return
    raw = path.with_name(plain_name(path))
    made = raw.with_stem(f"{raw.stem}-utf8")
    given = shlex.quote(str(path))
    source = f"{tool_of(path)} -dc {given} | iconv" if raw != path else f"iconv {given}"
    raise DataError(
        f"{path} is encoded as {encoding}, but must be UTF-8. After the conversion set data.path={made}",
        code="unsupported_file_type",
        fix=f"{source} -f {encoding} -t UTF-8 > {shlex.quote(str(made))}",
    )


def _from_binary(path: Path, read: Any) -> Iterator[NumberedRow]:
    with open_file(path) as file:
        yield from read(file)


def _until_damaged(path: Path, rows: Iterator[NumberedRow]) -> Iterator[NumberedRow]:
    """Yield the rows of a compressed file up to the damage, then an error."""
    number = 0
    try:
        for number, row in rows:
            yield number, row
    except DAMAGE as error:
        tool = tool_of(path)
        reason = f"the {tool} data is damaged and the rows after it cannot be read: {error}"
        yield (
            number + 1,
            RowError(DAMAGED, reason, raw="", fix=f"download or write the file again, and check it with {tool} -t"),
        )


def _read_json(path: Path, file: IO[bytes]) -> Iterator[NumberedRow]:
    """Read one object per line, or (in .json only) one array of objects. The first character decides."""
    if ".json" in path.suffixes and _first_character(file) == b"[":
        return read_array(file)
    return read_lines(file)


def _first_character(file: IO[bytes]) -> bytes:
    head = cast(io.BufferedReader, file).peek(4096)[:4096]
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def _read_csv(path: Path) -> Iterator[NumberedRow]:
    """Read the records after the header. A record with another number of cells is rejected, not shifted."""
    csv.field_size_limit(MAX_ROW)  # the default of 128 KiB is shorter than a long document
    # invalid UTF-8 bytes arrive as surrogates, which identify the record
    with io.TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="", errors="surrogateescape") as file:
        records = _records(csv.reader(_lines(file, path), strict=True, delimiter=_delimiter(path)))
        header = next(records, None)
        if header is None:
            raise DataError(f"{path} is empty: the first line must contain the column names", code="damaged_file")
        if isinstance(header, RowError):
            raise DataError(f"{path}: the header cannot be read: {header.message}", code="damaged_file")
        twice = sorted({column for column in header if header.count(column) > 1})
        if twice:
            raise DataError(f"{path} has two columns named {twice[0]!r}", code="ambiguous")
        for number, record in enumerate(records, 1):
            yield number, record if isinstance(record, RowError) else _cells(record, header)


def _lines(file: IO[str], path: Path) -> Iterator[str]:
    """Lines, and as many of one record, that fit into memory. Raises DataError."""
    while line := file.readline(MAX_ROW + 1):
        if len(line) > MAX_ROW:
            raise too_long(path)
        yield line


def _delimiter(path: Path) -> str:
    """Return the column separator: a comma, unless the header has none but a `;`, tab or `|`. Spreadsheets write a
    semicolon if the comma is the decimal separator.
    """
    with io.TextIOWrapper(open_file(path), encoding="utf-8-sig", errors="replace", newline="") as file:
        header = re.sub(r'"[^"]*"', "", file.readline(MAX_HEADER))
    return "," if "," in header else max(DELIMITERS, key=header.count) if any(map(header.count, DELIMITERS)) else ","


def _records(reader: Any) -> Iterator[list[str] | RowError]:
    """Records that are not empty. One whose quotes do not end, or end in the middle of a cell, is an error."""
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            yield RowError(
                "csv", f"the record is not valid CSV: {error} (line {reader.line_num:,} of the file)", raw=""
            )
            continue
        if cells is None:
            return
        if cells:
            yield cells


def _cells(cells: list[str], header: list[str]) -> Row | RowError:
    raw = ",".join(cells)
    try:
        raw.encode()
    except UnicodeEncodeError as error:
        shown = raw.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        byte = ord(raw[error.start]) - 0xDC00
        fix = "convert the file to UTF-8, for example: iconv -f WINDOWS-1252 -t UTF-8 FILE > utf8.csv"
        return RowError("not_utf8", f"not UTF-8: byte 0x{byte:02x}", raw=shown, fix=fix)
    if len(cells) != len(header):
        return RowError(
            "cells", f"the record has {len(cells)} cells, but the header has {len(header)} columns", raw=raw
        )
    return dict(zip(header, cells, strict=True))


def _read_parquet(path: Path) -> Iterator[NumberedRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(arrow_source(path)) as file:
            _refuse_bombs(path, file.metadata)
            yield from _from_arrow(file.iter_batches(batch_size=1024))
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is not a valid parquet file: {error}", code="damaged_file") from error


def _refuse_bombs(path: Path, metadata: Any) -> None:
    """Raise DataError for a group of rows that unpacks to more than memory is meant for, of very little."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        packed = sum(group.column(i).total_compressed_size for i in range(group.num_columns))
        if group.total_byte_size > max(_MAX_GROUP, _MAX_RATIO * packed):
            raise DataError(
                f"{path}: row group {number} decompresses from {packed:,} to {group.total_byte_size:,} bytes",
                code="limit_exceeded",
                fix="write the file with smaller row groups: pyarrow.parquet.write_table(..., row_group_size=10000)",
            )


def _read_arrow(path: Path) -> Iterator[NumberedRow]:
    """Arrow IPC, as a file or as the stream that `datasets` writes."""
    import pyarrow

    is_remote = isinstance(path, RemotePath)
    with pyarrow.PythonFile(path.open("rb")) if is_remote else pyarrow.memory_map(str(path)) as source:
        try:
            reader = pyarrow.ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        except pyarrow.ArrowInvalid:
            source.seek(0)
            try:
                batches = iter(pyarrow.ipc.open_stream(source))
            except pyarrow.ArrowInvalid as error:
                raise DataError(f"{path} is not an Arrow file or stream: {error}", code="damaged_file") from error
        yield from _from_arrow(batches)


def _from_arrow(batches: Iterable[Any]) -> Iterator[NumberedRow]:
    import pyarrow

    number = 0
    try:
        for batch in batches:
            for row in _rows_of(batch):
                number += 1
                yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        if number == 0 and isinstance(error, pyarrow.ArrowInvalid):
            raise
        reason = f"the table is damaged and the rows after it cannot be read: {error}"
        yield number + 1, RowError(DAMAGED, reason, raw="", fix="download or write the file again")


def _rows_of(batch: Any) -> Iterator[Row | RowError]:
    try:
        yield from map(TableRow, batch.to_pylist())
        return
    except UnicodeDecodeError:  # of one of its rows: find out which
        pass
    for index in range(batch.num_rows):
        try:
            yield TableRow(batch.slice(index, 1).to_pylist()[0])
        except UnicodeDecodeError as error:
            yield RowError("not_utf8", f"not UTF-8: byte 0x{error.object[error.start]:02x}", raw=str(error.object[:80]))


def load_hub(source: SourceConfig) -> Any:
    """The hub dataset as `datasets.Dataset`, from the local cache when it is there. Raises DataError with the library's
    reason.
    """
    import datasets  # 0.7 CPU seconds, so imported only if needed

    try:
        return datasets.load_dataset(source.path, source.name, split=source.split, revision=source.revision)
    except (
        Exception
    ) as error:  # the library raises many kinds (network, missing split, unsafe code, gated): all concern the user
        raise _hub_error(source, error) from error


def hub_files(source: SourceConfig) -> list[str]:
    """The files of a split of a hub dataset, as URLs of its commit. Raises DataError with the library's reason."""
    import datasets

    try:
        builder = datasets.load_dataset_builder(source.path, source.name, revision=source.revision)
        return [str(file) for file in builder.config.data_files[source.split]]
    except Exception as error:
        raise _hub_error(source, error) from error


def _hub_error(source: SourceConfig, error: Exception) -> DataError:
    what = f"cannot load the hub dataset {source.path} (split {source.split!r})"
    if hub.is_offline(error):
        fix = hub.download_rows(source.path, source.revision)
        return DataError(f"{what}: {hub.not_here(source.path)}", code="missing_file", keys=("data.path",), fix=fix)
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return DataError(
        f"{what}: {reason}",
        code="server_rejected",
        keys=("data.path",),
        fix="data.path=<a local file>, or check data.name, data.split, data.revision and the network",
    )


def read_hub(dataset: Any) -> Iterator[NumberedRow]:
    """Rows of a loaded hub dataset, numbered from 1."""
    return enumerate(map(TableRow, dataset), 1)
