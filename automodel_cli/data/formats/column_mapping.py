"""Which column holds which field: a wrong name is answered with the right one, never with a guess."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from automodel_cli.config.errors import DataError
from automodel_cli.data.formats.unused_columns import PICTURES
from automodel_cli.data.row_errors import RowError, SourceRow

LIST_COLUMNS = ("messages", "conversations", "conversation")
USUAL_NAMES: dict[str, tuple[str, ...]] = {
    "messages": (*LIST_COLUMNS, "chat", "dialogue", "dialog", "turns"),
    "prompt": ("prompt", "question", "instruction", "input", "query", "problem", "user"),
    "completion": ("completion", "answer", "response", "output", "solution", "reply", "target", "assistant"),
    "text": ("text", "content", "document", "article", "body", "page", "passage", "sentence", "review"),
    "instruction": ("instruction", "question", "prompt", "query", "problem"),
    "output": ("output", "response", "answer", "completion", "solution", "target"),
    "chosen": ("chosen", "preferred", "accepted", "positive"),
    "rejected": ("rejected", "dispreferred", "refused", "negative"),
    "label": ("label", "labels", "class", "category", "sentiment", "score", "rating", "desirable", "preference"),
    "query": ("query", "anchor", "question", "sentence1"),
    "positive": ("positive", "pos", "passage", "answer", "document", "sentence2"),
    "tokens": ("tokens", "words"),
    "tags": ("tags", "ner_tags", "pos_tags", "labels"),
    "text_pair": ("text_pair", "text2", "sentence2", "passage", "document"),
    "system": ("system", "system_prompt"),
    "tools": ("tools", "functions"),
}
"""Common column names of each field, most likely first."""


_OPTIONAL = ("system", "tools", "input", "history", PICTURES[0])


def picture_columns(mapped: Mapping[str, str]) -> tuple[str, ...]:
    """Return the columns that may hold the pictures of a row: the mapped one, or those with the usual names."""
    column = mapped.get(PICTURES[0])
    return PICTURES if column is None else (column,)


def text_columns(mapped: Mapping[str, str]) -> dict[str, str]:
    """Return the columns of the fields of a format. Pictures are read before a format reads the row."""
    return {field: column for field, column in mapped.items() if field != PICTURES[0]}


def column_for(field: str, columns: Iterable[str]) -> str | None:
    """Return the usual column of this field or None. Example: `question` and `user_question` hold a prompt."""
    columns = list(columns)
    for usual in USUAL_NAMES.get(field, (field,)):
        for column in columns:
            if column.lower() == usual or usual in column.lower().replace("-", "_").split("_"):
                return column
    return None


def check_mapped(rows: Sequence[Mapping[str, Any]], mapped: Mapping[str, str], where: str) -> None:
    """Raise DataError for a mapped column that no row has, and suggest the correct column.

    Columns that may be missing in most rows are left to `MissingColumnTracker`.
    """
    present = list(dict.fromkeys(column for row in rows for column in row))
    wrong = [field for field, column in mapped.items() if column and column not in present]
    if rows and any(field not in _OPTIONAL for field in wrong):
        raise _wrong_columns(wrong, mapped, present, where)


def _wrong_columns(wrong: Sequence[str], mapped: Mapping[str, str], present: Sequence[str], where: str) -> DataError:
    taken = {column for field, column in mapped.items() if field not in wrong}
    meant: dict[str, str] = {}
    for field in wrong:
        free = [column for column in present if column not in taken]
        near = difflib.get_close_matches(mapped[field].lower(), [column.lower() for column in free], 1, 0.7)
        column = next((c for c in free if near and c.lower() == near[0]), None) or column_for(field, free)
        if column is not None:
            meant[field] = column
            taken.add(column)
    names = " and ".join(f"{field} to {mapped[field]!r}" for field in wrong)
    text = (
        f"{where}: data.column_mapping maps {names}, but no row has this column (columns: {', '.join(sorted(present))})"
    )
    fixed = {field: meant.get(field, f"<one of {', '.join(sorted(present))}>") for field in wrong}
    return DataError(text, code="unknown_name", keys=("data.column_mapping",), fix=columns_fix({**mapped, **fixed}))


def columns_fix(mapped: Mapping[str, str]) -> str:
    """The override that sets this map."""
    return f"data.column_mapping='{{{', '.join(f'{field}: {column}' for field, column in mapped.items())}}}'"


class MissingColumnTracker:
    """Watches rows go by for the mapped columns that none of them has: a misspelt optional field is no empty one."""

    def __init__(self, mapped: Mapping[str, str], where: str):
        self.mapped, self.where = mapped, where
        self.missing = {column for column in mapped.values() if column}
        self.present: dict[str, None] = {}

    def watch(self, origins: Iterable[SourceRow]) -> Iterator[SourceRow]:
        """The same rows."""
        for origin in origins:
            if self.missing and not isinstance(origin.row, RowError):
                self.missing -= origin.row.keys()
                if len(self.present) < 1000:
                    self.present.update(dict.fromkeys(origin.row))
            yield origin

    def check(self) -> None:
        """After the last row. Raises DataError."""
        if self.missing and self.present:
            wrong = [field for field, column in self.mapped.items() if column in self.missing]
            raise _wrong_columns(wrong, self.mapped, list(self.present), self.where)
