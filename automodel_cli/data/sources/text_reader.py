"""Plain text as rows with the one column `text`: a file, a paragraph or a line each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from automodel_cli.config.errors import DataError
from automodel_cli.data.json_reader import MAX_ROW, NumberedRow, Row, bounded_lines, too_long
from automodel_cli.data.row_errors import RowError
from automodel_cli.data.source_config import TxtRows

MAX_DOCUMENT = 64 << 20
"""Bytes: a tokenizer needs about 30 times the size of a text that is one document."""


def read_text(file: IO[bytes], path: Path, text_unit: TxtRows) -> Iterator[NumberedRow]:
    """The file as one document, each of its paragraphs (blank lines lie between them), or each line that is not blank.

    The number is the line that the text begins in. Raises DataError for a document too large to be tokenised at once.
    """
    if text_unit == "file":
        content = file.read(MAX_DOCUMENT + 1)
        if len(content) > MAX_DOCUMENT:
            raise DataError(
                f"text_unit=file is not supported for {path}, because it exceeds {MAX_DOCUMENT >> 20} MiB",
                code="limit_exceeded",
                keys=("data.text_unit",),
                fix="data.text_unit=paragraph, or data.text_unit=line",
            )
        yield 1, _row(content)
        return
    gathered: list[bytes] = []
    size = 0
    for number, line in enumerate(bounded_lines(file), 1):
        blank = not line.strip()
        if text_unit == "line" and not blank:
            yield number, _row(line.rstrip(b"\r\n"))
        elif text_unit == "paragraph" and blank and gathered:
            yield number - len(gathered), _row(b"".join(gathered).rstrip(b"\r\n"))
            gathered, size = [], 0
        elif text_unit == "paragraph" and not blank:
            gathered.append(line)
            size += len(line)
            if size > MAX_ROW:
                raise too_long(path)
    if gathered:
        yield number - len(gathered) + 1, _row(b"".join(gathered).rstrip(b"\r\n"))


def _row(content: bytes) -> Row | RowError:
    try:
        return {"text": content.decode("utf-8-sig")}
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = f"not UTF-8: byte 0x{content[error.start]:02x} in line {line:,} of the text"
        raw = content[max(0, error.start - 80) : error.start + 80].decode("utf-8", "replace")
        return RowError("not_utf8", message, raw=raw, fix="iconv -f WINDOWS-1252 -t UTF-8 FILE > utf8.txt")
