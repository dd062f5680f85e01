"""Rows with preferences: two responses of which one is better, or one response rated good or bad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from automodel_cli.data.formats.base import FirstRows, Makes
from automodel_cli.data.formats.column_mapping import LIST_COLUMNS
from automodel_cli.data.formats.examples import Conversation, Document, JudgedResponse, Messages, Pair
from automodel_cli.data.formats.messages import chat_or_text
from automodel_cli.data.formats.row_accessor import Fields
from automodel_cli.data.row_errors import RowError, is_finite_number


@dataclass(frozen=True)
class PreferencePairs:
    """A prompt with a chosen and a rejected response, or two conversations with the same beginning."""

    name: ClassVar[str] = "preference"
    fields: ClassVar[tuple[str, ...]] = ("prompt", "messages", "chosen", "rejected", "margin", "system", "tools")
    makes: ClassVar[Makes] = "pairs"

    def detects(self, sample: FirstRows) -> bool:
        return {"chosen", "rejected"} <= sample.has

    def read(self, row: Fields) -> Pair:
        return replace(self._pair(row), margin=_margin(row))

    def _pair(self, row: Fields) -> Pair:
        chosen, rejected = (row.messages_of(field, "assistant") for field in ("chosen", "rejected"))
        is_conversation = [
            any(message["role"] != "assistant" for message in messages) for messages, _ in (chosen, rejected)
        ]
        if is_conversation[0] != is_conversation[1]:
            raise RowError("bad_role", "one of chosen and rejected is a conversation, the other only a response")
        if not is_conversation[0]:
            return row.pair_of(_prompt(row), chosen, rejected)
        prompt = _shared_prompt(row, (chosen[0], rejected[0]))
        first, second = ((messages[len(prompt) :], flags[len(prompt) :]) for messages, flags in (chosen, rejected))
        return row.pair_of(prompt, first, second)


@dataclass(frozen=True)
class JudgedResponses:
    """A prompt, one response, and whether it is good."""

    name: ClassVar[str] = "unpaired_preference"
    fields: ClassVar[tuple[str, ...]] = ("prompt", "messages", "completion", "label", "system", "tools")
    makes: ClassVar[Makes] = "judged"

    def detects(self, sample: FirstRows) -> bool:
        return "label" in sample.has

    def read(self, row: Fields) -> JudgedResponse:
        label = row["label"]
        if label not in (True, False):
            raise RowError("bad_label", f"{row.column('label')} is {label!r}, but must be true or false")
        if "completion" in row:
            prompt, (response, trained) = _prompt(row), row.messages_of("completion", "assistant")
        else:
            messages, flags = row.messages("messages")
            last = max((i for i, message in enumerate(messages) if message["role"] != "assistant"), default=-1)
            prompt, response, trained = messages[: last + 1], messages[last + 1 :], flags[last + 1 :]
        if not prompt or not response or any(message["role"] != "assistant" for message in response):
            raise RowError("bad_role", "a judged response needs a prompt followed by assistant messages")
        return JudgedResponse(prompt, response, trained, row.optional_text("system"), row.tools(), bool(label))


def judged_document(row: JudgedResponse, answered: JudgedResponse, *, chat: bool) -> Document:
    """The prompt of `row` with the response of `answered`."""
    trained = [False] * len(row.prompt) + answered.trained
    document = chat_or_text(row.prompt + answered.response, trained, row.system, row.tools, chat=chat)
    return replace(document, pictures=row.pictures) if isinstance(document, Conversation) else document


def _margin(row: Fields) -> float:
    margin = row.get("margin")
    if margin is None:
        return 0.0
    if not is_finite_number(margin):
        raise RowError("bad_margin", f"{row.column('margin')} is {margin!r}, but must be a finite number")
    return float(margin)


def _prompt(row: Fields) -> Messages:
    """The messages before the response: the prompt, or the conversation so far."""
    listed = any(column in row.row for column in LIST_COLUMNS)
    field = "messages" if "messages" in row.columns or (listed and "prompt" not in row.row) else "prompt"
    if field == "prompt" and "prompt" not in row.columns and "prompt" not in row.row:
        raise RowError(
            "missing_column",
            f"the prompt is missing: chosen and rejected contain only responses (columns: {', '.join(row.row)})",
            fix="data.column_mapping='{prompt: <column>}'",
        )
    messages, _ = row.messages_of(field, "user")
    if not isinstance(row[field], str) and not row.chat:
        raise RowError("no_template", f"{row.column(field)} contains messages, which require a chat template")
    return messages


def _shared_prompt(row: Fields, sides: Sequence[Messages]) -> Messages:
    """The messages with which both conversations begin."""
    chosen, rejected = sides
    count = 0
    while count < min(len(chosen), len(rejected)) and chosen[count] == rejected[count]:
        count += 1
    prompt = chosen[:count]
    if not prompt:
        raise RowError("no_prompt", "chosen and rejected do not begin with the same message")
    if len(chosen) == count or len(rejected) == count:
        raise RowError("same_responses", "one of chosen and rejected is a prefix of the other")
    if row.get("prompt"):
        messages, _ = row.messages_of("prompt", "user")
        shared = [message["content"].strip() for message in prompt]
        if any(message["content"].strip() not in shared for message in messages):
            raise RowError(
                "bad_prompt", f"{row.column('prompt')} is not one of the messages that chosen and rejected share"
            )
    return prompt
