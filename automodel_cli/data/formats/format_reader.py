"""Apply a format to the rows of one source. Torch-free."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from automodel_cli.config.errors import DataError
from automodel_cli.config.security import targets
from automodel_cli.data.formats.base import DOCUMENTS, Format
from automodel_cli.data.formats.builtin import format_name
from automodel_cli.data.formats.column_mapping import LIST_COLUMNS, text_columns
from automodel_cli.data.formats.examples import (
    AnsweredPrompt,
    Conversation,
    Example,
    JudgedResponse,
    LabeledText,
    Messages,
    Pair,
    PlainText,
    TextGroup,
)
from automodel_cli.data.formats.messages import ROLES
from automodel_cli.data.formats.row_accessor import Fields
from automodel_cli.data.formats.unused_columns import NO_OTHER_KEYS, TRAINING_COLUMNS, AllowedKeys
from automodel_cli.data.row_errors import RowError, attempt, without_nulls


class RowReader:
    """Turns rows into the documents that a format makes of them. `columns` names the column of each of its fields."""

    def __init__(
        self,
        fmt: Format,
        columns: Mapping[str, str],
        *,
        chat: bool,
        keys: AllowedKeys = NO_OTHER_KEYS,
        refused: Collection[str] = TRAINING_COLUMNS,
    ):
        """`chat`: a chat template exists, so prompt and completion become a user and an assistant turn. `keys`: allowed
        names in addition to the fields of the format. `refused`: columns that must not occur unread.
        """
        self.format, self.columns, self.chat, self.keys, self.refused = fmt, text_columns(columns), chat, keys, refused
        self.name, self._is_ours = format_name(fmt), targets.is_own(type(fmt))
        stray = [field for field in self.columns if field not in fmt.fields]
        if stray:
            raise DataError(
                f"data.column_mapping maps {stray[0]!r}, but the fields of {self.name} are: {', '.join(fmt.fields)}",
                code="unknown_name",
                keys=("data.column_mapping",),
                fix=f"remove {stray[0]} from data.column_mapping, or set data.format",
            )
        self.columns_read, self._what = self._columns_read(), f"format {self.name}"

    def read(self, row: Mapping[str, Any]) -> Example:
        """Return the row as a document. Raises RowError with the field, its value and the expected value."""
        row = without_nulls(row)
        self.keys.refuse(row, self.columns_read, self._what, self.refused)
        fields = Fields(row, self.format.fields, self.columns, chat=self.chat, keys=self.keys)
        return self.format.read(fields) if self._is_ours else self._read_with_care(fields)

    def ordered_columns(self, row: Mapping[str, Any]) -> list[str]:
        """The columns of the row that the format reads, in the order of its fields."""
        names = [self.columns.get(field, field) for field in self.format.fields]
        return [name for name in dict.fromkeys((*names, *LIST_COLUMNS)) if name in row]

    def reads_without_template(self, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether these rows can be read without a chat template."""
        plain = RowReader(self.format, self.columns, chat=False, keys=self.keys, refused=self.refused)
        documents = [attempt(plain.read, row) for row in rows]
        return all(isinstance(d, AnsweredPrompt | PlainText | Pair | JudgedResponse) for d in documents)

    def _columns_read(self) -> set[str]:
        """Return the columns that `read` uses, and `rejected` if the config trains on `chosen` alone."""
        read = {self.columns.get(field, field) for field in self.format.fields}
        if "messages" in self.format.fields and "messages" not in self.columns:
            read.update(LIST_COLUMNS)
        left_out = {field for field, column in self.columns.items() if not column}
        return read | left_out | ({"rejected"} if "chosen" in self.columns.values() else set())

    def _read_with_care(self, fields: Fields) -> Example:
        """Return the result of a custom format, after checking that it has the declared kind."""
        try:
            document = self.format.read(fields)
        except RowError:
            raise
        except Exception as error:  # whatever it raises belongs to its row
            place = traceback.extract_tb(error.__traceback__)[-1]
            words = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
            raise RowError("format_error", f"format {self.name} raised {words}") from error
        expected = DOCUMENTS[self.format.makes]
        if not isinstance(document, expected):
            raise RowError(
                "format_error",
                f"format {self.name} returned {type(document).__name__}, but makes={self.format.makes} requires "
                f"{' or '.join(kind.__name__ for kind in expected)}",
            )
        for part in (document.chosen, document.rejected) if isinstance(document, Pair) else (document,):
            self._check_document(part)
        return document

    def _check_document(self, document: object) -> None:
        """Documents that a format builds itself instead of by the methods of `Fields`."""
        match document:
            case Conversation():
                self._check_messages(document.messages, document.trained)
            case JudgedResponse():
                self._check_messages(document.prompt, [False] * len(document.prompt))
                self._check_messages(document.response, document.trained)
            case AnsweredPrompt():
                self._check_texts(document.prompt, document.completion)
            case PlainText():
                self._check_texts(document.text)
            case LabeledText():
                self._check_texts(*((document.text,) if isinstance(document.text, str) else document.text))
            case TextGroup():
                self._check_texts(document.query, document.positive, *document.negatives)
            case _:
                raise self._made(f"a pair of {type(document).__name__}")

    def _check_texts(self, *texts: object) -> None:
        if not all(isinstance(text, str) for text in texts):
            raise self._made("a document that is not text")

    def _check_messages(self, messages: Messages, trained: object) -> None:
        if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
            raise self._made(f"messages without a known role and text: {messages!r:.80}")
        spoken = [message["role"] == "assistant" for message in messages]
        if not isinstance(trained, list) or len(trained) != len(spoken):
            raise self._made(
                f"{len(messages)} messages with `trained`={trained!r:.80}, which must have one flag per message"
            )
        if any(flag and not says for flag, says in zip(trained, spoken, strict=True)):
            raise self._made("a trained message whose role is not assistant")

    def _made(self, what: str) -> RowError:
        return RowError("format_error", f"format {self.name} returned {what}")


def _is_message(message: object) -> bool:
    match message:
        case {"role": role, "content": str()}:
            return role in ROLES
    return False
