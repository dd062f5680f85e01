"""Rows with preferences: two responses of which one is better, or one response that is judged good or bad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from automodel_cli.config.errors import DataError
from automodel_cli.data.config import PREFERENCE_FIELDS
from automodel_cli.data.formats import LIST_COLUMNS, Document, RowReader, as_messages, read_messages, usual_columns
from automodel_cli.data.rows import RowError, without_nulls

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Pair:
    """The same prompt with the better and the worse response."""

    chosen: Document
    rejected: Document


@dataclass(frozen=True)
class Judged:
    """A prompt and one response, good (`desirable`) or bad; apart, because the prompt is also scored with a response
    that was given to another.
    """

    prompt: Messages
    response: Messages
    trained: list[bool]
    system: str
    tools: list[dict[str, Any]] | None
    desirable: bool


def detect_preferences(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], where: str) -> str:
    """`preference` or `judged`, told by the columns that most of the first rows share, or by `columns` alone.

    Raises DataError naming the columns and a `columns` to paste.
    """
    shared = usual_columns(rows)
    has = shared | {field for field, column in columns.items() if column in shared}
    for name, needed in (("preference", {"chosen", "rejected"}), ("judged", {"label"})):
        if needed <= has and set(columns) <= set(PREFERENCE_FIELDS[name]):
            return name
    names = ", ".join(sorted(shared)) or "(none that most rows share)"
    raise DataError(
        f"{where}: no preferences in the columns {names}; a pair has chosen and rejected, a judged response a label",
        fix="data.columns='{prompt: <column>, chosen: <column>, rejected: <column>}', or a recipe for plain rows (sft)",
    )


class PreferenceReader(RowReader):
    """Turns rows of the formats `preference` and `judged` into `Pair` and `Judged`."""

    def read_preference(self, row: Mapping[str, Any]) -> Pair | Judged:
        """Raises RowError naming the field, what stands there, and what would be read."""
        row = without_nulls(row)
        self.refuse_unread(row)
        return self._judged(row) if self.fmt == "judged" else self._pair(row)

    def _pair(self, row: Mapping[str, Any]) -> Pair:
        sides = [self._response(row, field) for field in ("chosen", "rejected")]
        whole = [any(message["role"] != "assistant" for message in messages) for messages, _ in sides]
        if whole[0] != whole[1]:
            raise RowError("bad_role", "one of chosen and rejected is a whole conversation, the other a response only")
        prompt = self._shared_prompt(row, sides) if whole[0] else self._prompt(row)
        start = len(prompt) if whole[0] else 0
        responses = [(messages[start:], trained[start:]) for messages, trained in sides]
        if responses[0][0] == responses[1][0]:
            raise RowError("same_responses", "chosen and rejected are the same")
        system, tools = self._optional_text(row, "system"), self._tools(row)
        chosen, rejected = (
            self.chat_or_text(prompt + messages, system, tools, [False] * len(prompt) + trained)
            for messages, trained in responses
        )
        return Pair(chosen, rejected)

    def _judged(self, row: Mapping[str, Any]) -> Judged:
        column, label = self._required(row, "label")
        if label not in (True, False):
            raise RowError("bad_label", f"{column} is {label!r}, not true or false")
        if self._column("completion", row) in row:
            prompt, (response, trained) = self._prompt(row), self._response(row, "completion")
        else:
            column, value = self._required(row, "messages")
            messages, flags = read_messages(value, column, self.keys)
            last = max((i for i, message in enumerate(messages) if message["role"] != "assistant"), default=-1)
            prompt, response, trained = messages[: last + 1], messages[last + 1 :], flags[last + 1 :]
        if not prompt or not response or any(message["role"] != "assistant" for message in response):
            raise RowError("bad_role", "a judged row needs a prompt, and assistant messages after it")
        return Judged(prompt, response, trained, self._optional_text(row, "system"), self._tools(row), bool(label))

    def judged_document(self, row: Judged, answered: Judged) -> Document:
        """The prompt of `row` with the response of `answered`."""
        trained = [False] * len(row.prompt) + answered.trained
        return self.chat_or_text(row.prompt + answered.response, row.system, row.tools, trained)

    def _response(self, row: Mapping[str, Any], field: str) -> tuple[Messages, list[bool]]:
        return as_messages(self._required(row, field), "assistant", self.keys)

    def _prompt(self, row: Mapping[str, Any]) -> Messages:
        """The messages before the response: the prompt, or the conversation so far."""
        listed = next((c for c in LIST_COLUMNS if c in row), None)
        field = "messages" if "messages" in self.columns or (listed and "prompt" not in row) else "prompt"
        if field == "prompt" and "prompt" not in self.columns and "prompt" not in row:
            raise RowError(
                "missing_column",
                f"no prompt: chosen and rejected hold responses only (the row has: {', '.join(row)})",
                fix="data.columns='{prompt: <column>}'",
            )
        column, value = self._required(row, field)
        messages, _ = as_messages((column, value), "user", self.keys)
        if not isinstance(value, str) and not self.chat:
            raise RowError("no_template", f"{column} holds messages, which need a chat template")
        return messages

    def _shared_prompt(self, row: Mapping[str, Any], sides: Sequence[tuple[Messages, list[bool]]]) -> Messages:
        """The messages with which both conversations begin."""
        chosen, rejected = (messages for messages, _ in sides)
        count = 0
        while count < min(len(chosen), len(rejected)) and chosen[count] == rejected[count]:
            count += 1
        prompt = chosen[:count]
        if not prompt:
            raise RowError("no_prompt", "chosen and rejected do not begin with the same message")
        if len(chosen) == count or len(rejected) == count:
            raise RowError("same_responses", "one of chosen and rejected is the beginning of the other")
        column = self._column("prompt", row)
        if row.get(column):
            said, _ = as_messages((column, row[column]), "user", self.keys)
            shared = [message["content"].strip() for message in prompt]
            if any(message["content"].strip() not in shared for message in said):
                raise RowError("bad_prompt", f"{column} is not among the messages that chosen and rejected share")
        return prompt
