"""Access to a row by the field names of its format, independent of column names. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from automodel_cli.data.formats.column_mapping import LIST_COLUMNS
from automodel_cli.data.formats.examples import Document, JudgedResponse, Messages, Pair
from automodel_cli.data.formats.messages import as_messages, chat_or_text, read_messages
from automodel_cli.data.formats.tool_calls import json_value
from automodel_cli.data.formats.unused_columns import NO_OTHER_KEYS, AllowedKeys
from automodel_cli.data.row_errors import RowError

Tools = Messages | None


class Fields(Mapping[str, Any]):
    """The argument of a format's `read`.

    `row["question"]` returns the column that `data.column_mapping` maps to `question`, or the column `question`. Raises
    RowError with the column name if the value is missing, empty or has another type.

    `chat`: whether there is a chat template. Without one, only a prompt and its completion can be rendered.
    """

    def __init__(
        self,
        row: Mapping[str, Any],
        names: Sequence[str],
        columns: Mapping[str, str],
        *,
        chat: bool = True,
        keys: AllowedKeys = NO_OTHER_KEYS,
    ):
        """`names`: fields of the format. `columns`: field -> column. `keys`: additional keys allowed in messages."""
        self.row, self.names, self.columns, self.chat, self.keys_known = row, names, columns, chat, keys

    def column(self, field: str) -> str:
        """Return the column that holds a field. Raises RowError for a field that the format does not list."""
        if field not in self.names:
            raise RowError(
                "unlisted_field",
                f"the format reads {field!r}, but its fields are: {', '.join(self.names)}",
                fix=f"add {field!r} to `fields` of the format",
            )
        if field in self.columns:
            return self.columns[field]
        if field == "messages":
            return next((column for column in LIST_COLUMNS if column in self.row), field)
        return field

    def __getitem__(self, field: str) -> Any:
        column = self.column(field)
        if column not in self.row:
            has = ", ".join(self.row) or "none"
            raise RowError("missing_column", f"the column {column!r} for {field} is missing (columns: {has})")
        return self.row[column]

    def __contains__(self, field: object) -> bool:
        return isinstance(field, str) and self.column(field) in self.row

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get(self, field: str, default: Any = None) -> Any:
        """Return the field, or `default` if the column is missing or null."""
        value = self.row.get(self.column(field))
        return default if value is None else value

    def text(self, field: str) -> str:
        """Return a field that must be non-empty text."""
        value = self._as_text(field, self[field])
        if not value.strip():
            raise RowError("empty", f"{self.column(field)} is empty")
        return value

    def optional_text(self, field: str) -> str:
        """Return a text field, or "" if it is missing."""
        return self._as_text(field, self.get(field, ""))

    def _as_text(self, field: str, value: object) -> str:
        if not isinstance(value, str):
            raise RowError("not_text", f"{self.column(field)} is {type(value).__name__}, not text")
        return value

    def tools(self) -> Tools:
        """Return the field `tools`: function descriptions, as a list or as JSON text."""
        column, value = self.column("tools"), self.get("tools")
        if isinstance(value, str) and value.strip():
            value = json_value(value, column, "bad_tools")
        if not value:
            return None
        if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
            raise RowError("bad_tools", f"{column} is {type(value).__name__}, not a list of tool descriptions")
        return value

    def messages(self, field: str) -> tuple[Messages, list[bool]]:
        """Return a field with OpenAI or ShareGPT messages in template form, and which of them have loss."""
        return read_messages(self[field], self.column(field), self.keys_known)

    def messages_of(self, field: str, role: str) -> tuple[Messages, list[bool]]:
        """Like `messages`, for a field that may also hold one message, or the text of one message of this role."""
        return as_messages((self.column(field), self[field]), role, self.keys_known)

    # -- constructors of documents

    def conversation(self, messages: Messages) -> Document:
        """Build a document from OpenAI or ShareGPT messages. Without a chat template: a prompt and its completion.

        Assistant messages have loss, except those with `train: false`. The fields `system` and `tools` are added if the
        format lists them.
        """
        read, trained = read_messages(messages, "the format's messages", self.keys_known)
        return chat_or_text(read, trained, *self._around(), chat=self.chat)

    def pair(self, prompt: str | Messages, chosen: str | Messages, rejected: str | Messages) -> Pair:
        """Build a pair from a prompt, a chosen and a rejected response, each as text or as messages. The fields
        `system` and `tools` are added if the format lists them.
        """
        messages, _ = as_messages(("the format's prompt", prompt), "user", self.keys_known)
        better, worse = (
            as_messages((f"the format's {name} response", response), "assistant", self.keys_known)
            for name, response in (("chosen", chosen), ("rejected", rejected))
        )
        return self.pair_of(messages, better, worse)

    def pair_of(
        self, prompt: Messages, chosen: tuple[Messages, list[bool]], rejected: tuple[Messages, list[bool]]
    ) -> Pair:
        """Like `pair`, for messages with loss flags. Raises RowError if both responses are equal."""
        if chosen[0] == rejected[0]:
            raise RowError("same_responses", "chosen and rejected are identical")
        before, (system, tools) = [False] * len(prompt), self._around()
        first, second = (
            chat_or_text(prompt + messages, before + trained, system, tools, chat=self.chat)
            for messages, trained in (chosen, rejected)
        )
        return Pair(first, second)

    def judged(self, prompt: str | Messages, response: str | Messages, desirable: bool) -> JudgedResponse:
        """Build a rated response from a prompt and one response, each as text or as messages. `desirable`: whether it
        is good. The fields `system` and `tools` are added if the format lists them.
        """
        prompt_messages, _ = as_messages(("the format's prompt", prompt), "user", self.keys_known)
        messages, trained = as_messages(("the format's response", response), "assistant", self.keys_known)
        return JudgedResponse(prompt_messages, messages, trained, *self._around(), bool(desirable))

    def _around(self) -> tuple[str, Tools]:
        """Return system text and tools, if the format reads them."""
        system = self.optional_text("system") if "system" in self.names else ""
        return system, self.tools() if "tools" in self.names else None
