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
from automodel_cli.data.formats.examples import AnsweredPrompt, Conversation, JudgedResponse, Pair, PlainText
from automodel_cli.data.formats.row_accessor import Fields

Makes = Literal["conversations", "texts", "pairs", "judged"]
DOCUMENTS: dict[str, tuple[type, ...]] = {
    "conversations": (Conversation, AnsweredPrompt),
    "texts": (PlainText,),
    "pairs": (Pair,),
    "judged": (JudgedResponse,),
}
"""What `read` returns, by what the format says that it makes."""
PREFERENCES = ("pairs", "judged")
"""What recipes of kind dpo train on; the others train on, or sample from, conversations and texts."""


class Format(Protocol):
    """What the node of `data.format` must have. Worker processes get a copy: it keeps nothing between rows."""

    @property
    @abstractmethod
    def fields(self) -> Sequence[str]:
        """What `read` asks the row for; `data.column_mapping` maps these names to columns."""
        ...

    @property
    @abstractmethod
    def makes(self) -> Makes:
        """`conversations` (sft, grpo), `texts` (sft), `pairs` or `judged` (dpo): what every row becomes."""
        ...

    @abstractmethod
    def read(self, row: Fields) -> Any:
        """The row as a document: `row.conversation(...)`, `PlainText`, `row.pair(...)` or `row.judged(...)`.

        For grpo a conversation; what the assistant says at its end is left out of the prompt. A row that cannot be used
        raises RowError; any other exception refuses the row too, with the place that raised it.
        """
        ...


@dataclass(frozen=True)
class FirstRows:
    """The first rows of a source, and `data.column_mapping`: what a format is told by."""

    rows: Sequence[Mapping[str, Any]]
    columns: Mapping[str, str]

    @cached_property
    def shared(self) -> set[str]:
        """Columns of more than half of the rows. One row without one of them is no sign of another format: it will be
        refused by its number.
        """
        counts = Counter(column for row in self.rows for column in row)
        return {column for column, count in counts.items() if 2 * count > len(self.rows)}

    @cached_property
    def has(self) -> set[str]:
        """Fields that most rows have, under their own name or a mapped one."""
        return self.shared | {field for field, column in self.columns.items() if column in self.shared}

    @cached_property
    def listed(self) -> str | None:
        """The column that holds messages, if any."""
        return self.columns.get("messages") or next((c for c in LIST_COLUMNS if c in self.shared), None)

    @property
    def is_pair(self) -> bool:
        """Whether rows have two responses, and `columns` does not choose one of them."""
        return "completion" not in self.columns and {"chosen", "rejected"} <= self.shared

    def first(self, column: str) -> Any:
        """The first value of a column."""
        return next((row[column] for row in self.rows if column in row), ())


class KnownFormat(Format, Protocol):
    """One of ours: it has a name, and is found by looking at rows."""

    name: ClassVar[str]

    def detects(self, sample: FirstRows) -> bool:
        """Whether rows like these are of this format."""
        ...
