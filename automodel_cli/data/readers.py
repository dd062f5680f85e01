"""Files and hub datasets as numbered rows. A row that cannot be parsed is an item of the stream, not the end of it."""

from __future__ import annotations

import csv
import difflib
import glob
import gzip
import io
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from automodel_cli.config.errors import DataError
from automodel_cli.data.config import SourceConfig
from automodel_cli.data.rows import RowError

Row = dict[str, Any]
NumberedRow = tuple[int, "Row | RowError"]

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".jsonl.gz", ".json.gz", ".csv.gz")
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")


def local_files(path: str) -> list[Path] | None:
    """The files that `path` names (one, a folder's, or a glob's, sorted), or None when it can only be a hub id.

    Raises DataError when it looks like a local path and nothing usable is there.
    """
    here = Path(path).expanduser()
    if here.is_file():
        return [_supported(here)]
    if here.is_dir():
        found = sorted(f for f in here.iterdir() if f.is_file() and f.name.endswith(SUFFIXES))
        if not found:
            raise DataError(f"no data file in folder {path}: looked for {', '.join(SUFFIXES)}")
        return found
    if glob.has_magic(path):
        found = sorted(Path(f) for f in glob.glob(str(here), recursive=True) if Path(f).is_file())
        if not found:
            raise DataError(f"no file matches {path}")
        return [_supported(f) for f in found]
    if HUB_ID.match(path) and not path.endswith(SUFFIXES) and not path.startswith("."):
        return None
    names = [f.name for f in here.parent.iterdir()] if here.parent.is_dir() else []
    near = difflib.get_close_matches(here.name, names, 1, 0.6)
    where = f"its folder {here.parent} does not exist" if not here.parent.is_dir() else f"seen from {Path.cwd()}"
    raise DataError(f"no such file: {path} ({where})", fix=f"data.path={here.parent / near[0]}" if near else None)


def _supported(path: Path) -> Path:
    if path.name.endswith(SUFFIXES):
        return path
    raise DataError(
        f"{path} has an unknown form {''.join(path.suffixes) or '(no suffix)'}: supported are {', '.join(SUFFIXES)}",
        fix=f"convert it, or name it {path.with_suffix('.jsonl')} if it holds one JSON object per line",
    )


def read_file(path: Path) -> Iterator[NumberedRow]:
    """The rows of one local file with their 1-based numbers: the line in jsonl, the record in every other form."""
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        return _read_parquet(path)
    if name.endswith(".arrow"):
        return _read_arrow(path)
    if name.endswith(".csv"):
        return _read_csv(path)
    return _read_json(path)


def _open(path: Path) -> IO[bytes]:
    return gzip.open(path, "rb") if path.name.endswith(".gz") else path.open("rb")  # type: ignore[return-value]


def _read_json(path: Path) -> Iterator[NumberedRow]:
    """One object per line, or (in .json only) one array of objects: the first character tells."""
    try:
        with _open(path) as file:
            if ".json" in path.suffixes and _first_character(file) == b"[":
                yield from _read_json_array(path, file.read())
            else:
                yield from _read_json_lines(file)
    except (gzip.BadGzipFile, EOFError) as error:
        raise DataError(f"{path} is not a whole gzip file: {error}") from error


def _first_character(file: IO[bytes]) -> bytes:
    head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    file.seek(0)
    return head[:1]


def _read_json_array(path: Path, content: bytes) -> Iterator[NumberedRow]:
    try:
        rows = json.loads(content.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8: byte 0x{content[error.start]:02x}") from error
    for number, row in enumerate(rows, 1):
        yield number, row if isinstance(row, dict) else _not_an_object(row)


def _read_json_lines(file: Iterable[bytes]) -> Iterator[NumberedRow]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        yield number, _parse_line(line)


def _parse_line(line: bytes) -> Row | RowError:
    try:
        text = line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError as error:
        message = f"not UTF-8: byte 0x{line[error.start]:02x} at byte {error.start + 1} of the line"
        return RowError("not_utf8", message, raw=line.decode("utf-8", "replace"))
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        fix = "write one JSON object per line" if text.strip() in ("{", "[", "[{") else None
        return RowError("not_json", f"not JSON: {error.msg} (column {error.colno})", raw=text, fix=fix)
    return row if isinstance(row, dict) else _not_an_object(row)


def _not_an_object(row: Any) -> RowError:
    raw = json.dumps(row, ensure_ascii=False)
    return RowError("not_an_object", f"the row is {_json_type(row)}, not an object with columns", raw=raw)


def _json_type(value: Any) -> str:
    names = {list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _read_csv(path: Path) -> Iterator[NumberedRow]:
    """Records after the header; a record with another number of cells than the header is refused, not shifted."""
    csv.field_size_limit(1 << 30)  # the default of 128 KiB is shorter than a long document
    with io.TextIOWrapper(_open(path), encoding="utf-8-sig", newline="", errors="replace") as file:
        reader = csv.reader(file)
        header = next(reader, None)
        if header is None:
            raise DataError(f"{path} is empty: the first line must name the columns")
        for number, cells in enumerate((c for c in reader if c), 1):
            if len(cells) != len(header):
                message = f"{len(cells)} cells where the header has {len(header)} columns"
                yield number, RowError("cells", message, raw=",".join(cells))
            else:
                yield number, dict(zip(header, cells, strict=True))


def _read_parquet(path: Path) -> Iterator[NumberedRow]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield from _from_arrow(file.iter_batches(batch_size=1024))
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is not a parquet file: {error}") from error


def _read_arrow(path: Path) -> Iterator[NumberedRow]:
    """Arrow IPC, as a file or as the stream that `datasets` writes."""
    import pyarrow

    with pyarrow.memory_map(str(path)) as source:
        try:
            reader = pyarrow.ipc.open_file(source)
            batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
        except pyarrow.ArrowInvalid:
            source.seek(0)
            try:
                batches = iter(pyarrow.ipc.open_stream(source))
            except pyarrow.ArrowInvalid as error:
                raise DataError(f"{path} is not an Arrow file or stream: {error}") from error
        yield from _from_arrow(batches)


def _from_arrow(batches: Iterable[Any]) -> Iterator[NumberedRow]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield number, row


def load_hub(source: SourceConfig) -> Any:
    """The hub dataset as `datasets.Dataset`, from the local cache when it is there. Raises DataError with the library's
    reason.
    """
    import datasets  # 0.7 CPU-seconds: only those who need it pay

    try:
        return datasets.load_dataset(source.path, source.name, split=source.split, revision=source.revision)
    except (
        Exception
    ) as error:  # the library raises many kinds (network, missing split, unsafe code, gated): all concern the user
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(
            f"cannot load the hub dataset {source.path} (split {source.split!r}): {reason}",
            fix="data.path=<a local file>, or check name, split, revision and the network",
        ) from error


def read_hub(dataset: Any) -> Iterator[NumberedRow]:
    """Rows of a loaded hub dataset, numbered from 1."""
    return enumerate(dataset, 1)
