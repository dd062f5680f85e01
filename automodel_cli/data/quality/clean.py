"""Write the rows that stay, and the removed ones with their reasons."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from automodel_cli.config.errors import DataError
from automodel_cli.data.conversion import create_file
from automodel_cli.data.quality.quality import Quality
from automodel_cli.data.row_errors import RowError, SourceRow

REMOVED = "removed.jsonl"


def check_target(folder: Path) -> None:
    """Raise DataError if the folder exists."""
    if folder.exists():
        raise DataError(
            f"{folder} exists already",
            code="file_exists",
            keys=("--write",),
            fix=f"--write {folder.with_name(f'{folder.name}-2')}",
        )


def check_readable(quality: Quality) -> None:
    """Raise DataError for rows that cannot be read, unless they are to be removed."""
    if damaged := quality.damaged:
        raise DataError(
            f"{damaged[0]} is damaged, and the rows after it cannot be read", code="damaged_file", fix="repair the file"
        )
    if quality.invalid and "invalid" not in quality.options.remove:
        source, row = quality.invalid[0]
        reasons = ",".join(("invalid", *quality.options.remove))
        raise DataError(
            f"{len(quality.invalid):,} rows cannot be read, first {source.files[row.file]}:{row.line}: {row.message}",
            code="bad_rows",
            keys=("--remove",),
            fix=f"--remove {reasons}",
        )


def write_clean(quality: Quality, names: list[str], folder: Path, suffix: str) -> dict[str, Any]:
    """Write `NAME + suffix` for each dataset and `removed.jsonl`. The folder appears when it is complete.

    Args:
        names: of the files, one for each dataset.
        suffix: `.jsonl`, `.jsonl.gz` or `.jsonl.zst`.

    Returns:
        numbers of kept rows by file, and of removed rows by reason. A row with several reasons counts for each.

    Raises:
        DataError: a row has bytes, which JSON cannot hold, or the data changed since they were measured.
    """
    removals = quality.removals()
    partial = folder.with_name(f".{os.getpid()}-{folder.name}")
    partial.mkdir(parents=True)
    try:
        kept = {}
        begin = 0
        with (partial / REMOVED).open("wb") as removed:
            for number, name in enumerate(names):
                path = partial / (name + suffix)
                with create_file(path, path) as out:
                    kept[path.name] = _write_source(quality, number, begin, removals, out, removed)
                begin += len(quality.features[number])
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    counts = {reason: int(chosen.sum()) for reason, chosen in removals.items()}
    return {"kept": kept, "removed": {"invalid": len(quality.invalid), **counts}}


def _write_source(
    quality: Quality,
    number: int,
    begin: int,
    removals: dict[str, np.ndarray],
    out: IO[bytes],
    removed: IO[bytes],
) -> int:
    """Write the rows of a dataset, whose first row is `begin`. Return the number of kept rows."""
    source, features = quality.sources[number], quality.features[number]
    invalid = {(row.file, row.line): row for row in features.invalid}
    places, num_kept, local = _places(quality, number), 0, 0
    for origin in source.rows():
        where = f"{source.files[origin.file]}:{origin.line}"
        if (unread := invalid.get((origin.file, origin.line))) is not None:
            _write(removed, {"row": where, "reasons": ["invalid"], "message": unread.message, "content": _raw(origin)})
            continue
        if next(places, None) != (origin.file, origin.line) or isinstance(origin.row, RowError):
            raise DataError(f"{source.name} changed while it was read ({where})", code="invalid_data")
        row, local = begin + local, local + 1
        if reasons := [reason for reason, chosen in removals.items() if chosen[row]]:
            _write(
                removed, {"row": where, "reasons": reasons, **_because(quality, row, reasons), "content": origin.row}
            )
        else:
            _write(out, origin.row)
            num_kept += 1
    if next(places, None) is not None:
        raise DataError(f"{source.name} changed while it was read: it has fewer rows", code="invalid_data")
    return num_kept


def _places(quality: Quality, number: int) -> Iterator[tuple[int, int]]:
    columns = quality.features[number].columns
    return zip(columns["file"].tolist(), columns["line"].tolist(), strict=True)


def _because(quality: Quality, row: int, reasons: list[str]) -> dict[str, object]:
    """Return what the reasons found: the first row of the cluster, the row of the evaluation, language and words."""
    number = int(quality.source_R[row])
    local = row - int(np.searchsorted(quality.source_R, number))
    columns, found = quality.features[number].columns, dict[str, Any]()
    for reason, clusters_R in (("exact", quality.exact_R), ("near", quality.near_R)):
        if reason in reasons:
            found["cluster"] = quality.where(int(clusters_R[row]))
    if "overlap" in reasons and quality.index is not None:
        found["evaluation"] = quality.index.origin(int(columns["unit"][local]))
        found["coverage"] = round(float(columns["coverage"][local]), 4)
    if "language" in reasons:
        found["language"] = columns["language"][local].decode()
    if "length" in reasons:
        found["words"] = int(columns["words"][local])
    return found


def _raw(origin: SourceRow) -> object:
    return origin.row.raw if isinstance(origin.row, RowError) else origin.row


def _write(file: IO[bytes], row: object) -> None:
    file.write(json.dumps(row, ensure_ascii=False, default=_plain).encode("utf-8", "surrogatepass") + b"\n")


def _plain(value: object) -> object:
    """Return dates and similar values as text, as `data.path` reads them."""
    if isinstance(value, bytes | bytearray):
        raise DataError(
            "rows with bytes (pictures) cannot be written as JSON", code="not_supported", fix="a report without --write"
        )
    return str(value)
