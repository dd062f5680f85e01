"""Protocol of dataset formats: the fields that a format reads, and the kind of document that it returns.

A custom format is a frozen dataclass with `fields`, `makes` and `read`, which the config names:

    data: {path: quiz.jsonl, format: {_target_: my_package.Quiz}}   # and on the command line --trust-package my_package

See examples/own_format.py and docs/guides/dataset_formats.md. Does not import torch.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, Protocol

from automodel_cli.data.formats.column_mapping import LIST_COLUMNS
from automodel_cli.data.formats.examples import (
    AnsweredPrompt,
    Conversation,
    Example,
    JudgedResponse,
    LabeledText,
    Pair,
    PlainText,
    TextGroup,
)
from automodel_cli.data.formats.row_accessor import Fields

Makes = Literal["conversations", "texts", "pairs", "judged", "labeled", "groups"]
DOCUMENTS: dict[str, tuple[type, ...]] = {
    "conversations": (Conversation, AnsweredPrompt),
    "texts": (PlainText,),
    "pairs": (Pair,),
    "judged": (JudgedResponse,),
    "labeled": (LabeledText,),
    "groups": (TextGroup,),
}
"""Return type of `read` for each value of `makes`."""
PREFERENCES = ("pairs", "judged")
"""Kinds for preference recipes."""
DataKind = Literal["documents", "preferences", "labeled", "groups"]
"""What a recipe trains on. Recipes of kind sft and grpo train on documents: conversations and texts."""
KINDS: dict[DataKind, tuple[Makes, ...]] = {
    "documents": ("conversations", "texts"),
    "preferences": ("pairs", "judged"),
    "labeled": ("labeled",),
    "groups": ("groups",),
}


class Format(Protocol):
    """Interface of the node in `data.format`. Worker processes get a copy, so it must keep no state between rows."""

    @property
    @abstractmethod
    def fields(self) -> Sequence[str]:
        """Fields that `read` accesses. `data.column_mapping` maps these names to columns."""
        ...

    @property
    @abstractmethod
    def makes(self) -> Makes:
        """Kind of the documents: `conversations` (sft, grpo), `texts` (sft), `pairs` or `judged` (dpo), `labeled`
        (classifier) or `groups` (embedding)."""
        ...

    @abstractmethod
    def read(self, row: Fields) -> Example:
        """Return the row as a document: `row.conversation(...)`, `PlainText`, `row.pair(...)` or `row.judged(...)`.

        For grpo return a conversation. Assistant messages at its end are removed from the prompt. Raise RowError for an
        unusable row. Any other exception also rejects the row, with the location of the exception.
        """
        ...


@dataclass(frozen=True)
class FirstRows:
    """The first rows of a source and `data.column_mapping`, from which the format is detected."""

    rows: Sequence[Mapping[str, Any]]
    columns: Mapping[str, str]

    @cached_property
    def shared(self) -> set[str]:
        """Columns of more than half of the rows. A single row without a column does not indicate another format. It is
        rejected later with its row number.
        """
        counts = Counter(column for row in self.rows for column in row)
        return {column for column, count in counts.items() if 2 * count > len(self.rows)}

    @cached_property
    def has(self) -> set[str]:
        """Fields that most rows have, under their name or a mapped one."""
        return self.shared | {field for field, column in self.columns.items() if column in self.shared}

    @cached_property
    def listed(self) -> str | None:
        """Name of the column that holds messages, if any."""
        return self.columns.get("messages") or next((c for c in LIST_COLUMNS if c in self.shared), None)

    @property
    def is_pair(self) -> bool:
        """Whether rows have two responses and `columns` does not select one of them."""
        return "completion" not in self.columns and {"chosen", "rejected"} <= self.shared

    def first(self, column: str) -> Any:
        """Return the first value of a column."""
        return next((row[column] for row in self.rows if column in row), ())


class KnownFormat(Format, Protocol):
    """A built-in format: it has a name and is detected from rows."""

    name: ClassVar[str]

    def detects(self, sample: FirstRows) -> bool:
        """Return whether these rows have this format."""
        ...
