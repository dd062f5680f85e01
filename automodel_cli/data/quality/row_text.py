"""Text of training rows, as their format reads it, and texts of evaluation rows, whatever their columns are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from automodel_cli.config.errors import DataError
from automodel_cli.data.formats.base import DataKind, Format
from automodel_cli.data.formats.builtin import detect_format, find_format
from automodel_cli.data.formats.examples import (
    AnsweredPrompt,
    Conversation,
    JudgedResponse,
    LabeledText,
    Messages,
    Pair,
    PlainText,
    TextGroup,
)
from automodel_cli.data.formats.format_reader import RowReader
from automodel_cli.data.formats.unused_columns import AllowedKeys
from automodel_cli.data.json_reader import Row
from automodel_cli.data.source_config import SourceConfig

_KINDS: tuple[DataKind, ...] = ("documents", "preferences", "labeled", "groups")


class _EveryName(frozenset[str]):
    """Contains every name: columns and keys that no recipe reads do not matter here."""

    def __contains__(self, name: object) -> bool:
        return True


class RowText:
    """Parts of the text of a row: pairs of a role and a text. Picklable, for worker processes."""

    def __init__(self, config: SourceConfig, examples: Sequence[Row], name: str):
        """`examples`: first rows, from which the format is detected. Raises DataError if no format fits them."""
        fmt = find_format(config.format) if config.format != "auto" else _detected(examples, config, name)
        keys = AllowedKeys(of_template=_EveryName())
        self.reader = RowReader(fmt, config.column_mapping, chat=True, keys=keys, refused=())

    def parts(self, row: Row) -> list[tuple[str, str]]:
        """Return role and text of each part, in order. Raises RowError for rows that do not have the format."""
        return list(_parts(self.reader.read(row)))


def _detected(examples: Sequence[Row], config: SourceConfig, name: str) -> Format:
    if not examples:
        return find_format("text")
    errors = []
    for kind in _KINDS:
        try:
            return detect_format(examples, config.column_mapping, name, kind=kind)
        except DataError as error:
            errors.append(error)
    fix = "--column <the column of the text>"
    raise DataError(errors[0].message, code=errors[0].code, keys=("--column",), fix=fix) from errors[0]


def _parts(document: object) -> Iterator[tuple[str, str]]:
    match document:
        case PlainText():
            yield "text", document.text
        case AnsweredPrompt():
            yield from (("user", document.prompt), ("assistant", document.completion))
        case Conversation():
            yield from _messages(document.messages)
            if document.tools:
                yield "tools", json.dumps(document.tools, sort_keys=True, default=str)
        case Pair():
            yield from _parts(document.chosen)
            yield "rejected", list(_parts(document.rejected))[-1][1]
        case JudgedResponse():
            yield from _messages([*document.prompt, *document.response])
            yield "desirable" if document.desirable else "undesirable", ""
        case LabeledText():
            text = document.text
            yield "text", text if isinstance(text, str) else " ".join(text)
            yield str(document.label), ""
        case TextGroup():
            passages = (document.positive, *document.negatives)
            yield from (("query", document.query), *(("passage", text) for text in passages))


def _messages(messages: Messages) -> Iterator[tuple[str, str]]:
    for message in messages:
        content = message.get("content")
        yield message["role"], content if isinstance(content, str) else json.dumps(content, default=str)
        if message.get("tool_calls"):
            yield message["role"], json.dumps(message["tool_calls"], sort_keys=True, default=str)


def values_of(row: object) -> Iterator[str]:
    """Yield every text in the values of a row of an evaluation, except system messages."""
    match row:
        case str():
            yield row
        case {"role": "system"}:
            pass
        case {**columns}:
            for value in columns.values():
                yield from values_of(value)
        case list() | tuple():
            for value in row:
                yield from values_of(value)
