"""Shapes of rows: each becomes a `Conversation`, a `Completion` or a `PlainText`, or is refused with the field that is
wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from automodel_cli.config.errors import DataError
from automodel_cli.data.columns import LIST_COLUMNS, column_for, columns_fix
from automodel_cli.data.config import ALL_FIELDS, FIELDS
from automodel_cli.data.rows import RowError, without_nulls
from automodel_cli.data.tool_calls import json_value, link_answers, read_calls
from automodel_cli.data.unread import NO_OTHER_KEYS, TRAINING_COLUMNS, KnownKeys

ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
    "tool": "tool",
}
PREFERENCE_COLUMNS = ("chosen", "rejected")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
MESSAGE_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "train", "weight", *REASONING_KEYS})
SHAREGPT_KEYS = frozenset({"from", "value", "train", "weight"})
PART_KEYS = frozenset({"type", "text"})


@dataclass(frozen=True)
class Conversation:
    """Messages as chat templates want them, the tools they may call, and per message whether it is trained."""

    messages: list[dict[str, Any]]
    trained: list[bool]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Completion:
    """A prompt and its continuation without a chat template."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class PlainText:
    """A document of which every token is trained."""

    text: str


Document = Conversation | Completion | PlainText


def detect_format(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], where: str) -> str:
    """The format of the first rows, told by the columns that most of them share, or by `columns` alone.

    Raises DataError naming the columns and a `columns` to paste.
    """
    shared = usual_columns(rows)
    fitting = [name for name, fields in FIELDS.items() if set(columns) <= set(fields)]
    if not fitting:
        raise DataError(
            f"{where}: columns maps {', '.join(columns)}, which no single format reads together",
            fix="data.columns='{prompt: question, completion: answer}'",
        )
    has = shared | {field for field, column in columns.items() if column in shared}
    listed = columns.get("messages") or next((c for c in LIST_COLUMNS if c in shared), None)
    preference = "completion" not in columns and set(PREFERENCE_COLUMNS) <= shared
    found = {
        "sharegpt": listed and _is_sharegpt(_first(rows, listed)) and not preference,
        "messages": listed and not preference,
        "prompt_completion": {"prompt", "completion"} <= has,
        "alpaca": {"instruction", "output"} <= has,
        "text": "text" in has,
    }
    for name, yes in found.items():
        if yes and name in fitting:
            return name
    names = ", ".join(sorted(shared)) or "(none that most rows share)"
    raise DataError(
        f"{where}: cannot tell the format from the columns {names}",
        fix=_suggest_columns(rows, shared),
    )


def usual_columns(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Columns of more than half of the rows. One row without one of them is no sign of another format: it will be
    refused by its number.
    """
    counts = Counter(column for row in rows for column in row)
    return {column for column, count in counts.items() if 2 * count > len(rows)}


def _first(rows: Sequence[Mapping[str, Any]], column: str) -> Any:
    return next(row[column] for row in rows if column in row)


def _is_sharegpt(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and "from" in value[0]


def _suggest_columns(rows: Sequence[Mapping[str, Any]], shared: set[str]) -> str:
    columns = dict.fromkeys(column for row in rows for column in row)
    if set(PREFERENCE_COLUMNS) <= shared:
        prompt = next((c for c in ("prompt", "question", *LIST_COLUMNS) if c in shared), "prompt")
        plain = f"data.columns='{{prompt: {prompt}, completion: chosen}}' trains on the preferred answer"
        return f"{plain}; a recipe of kind dpo trains on both"
    listed = [c for c in columns if c in shared and _is_chat(_first(rows, c))]
    if listed:
        return columns_fix({"messages": listed[0]})
    texts = [c for c in columns if c in shared and isinstance(_first(rows, c), str)]
    asked, answered, text = (column_for(field, texts) for field in ("prompt", "completion", "text"))
    if asked and answered:
        return columns_fix({"prompt": asked, "completion": answered})
    if text or len(texts) == 1:
        return columns_fix({"text": text or texts[0]})
    names = f"one of {', '.join(texts)}" if texts else "column"
    return f"data.columns='{{prompt: <{names}>, completion: <{names}>}}', or '{{text: <{names}>}}'"


def _is_chat(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and ("role" in first or "from" in first)


class RowReader:
    """Turns rows of one format into documents. `columns` names the column that holds each field of the format."""

    def __init__(self, fmt: str, columns: Mapping[str, str], *, chat: bool, keys: KnownKeys = NO_OTHER_KEYS):
        """`chat`: a chat template is there, so prompt and completion become a user and an assistant turn. `keys`: what
        a row may hold besides the fields of its format.
        """
        self.fmt, self.columns, self.chat, self.keys = fmt, dict(columns), chat, keys
        stray = [field for field in columns if field not in ALL_FIELDS[fmt]]
        if stray:
            raise DataError(
                f"format {fmt} reads no {stray[0]!r}; its fields are {', '.join(ALL_FIELDS[fmt])}",
                fix=f"remove {stray[0]} from data.columns, or set data.format",
            )

    def read(self, row: Mapping[str, Any]) -> Document:
        """The row as a document. Raises RowError naming the field, what stands there, and what would be read."""
        row = without_nulls(row)
        self.refuse_unread(row)
        if self.fmt in ("messages", "sharegpt"):
            return self._conversation(row)
        if self.fmt == "alpaca":
            return self._alpaca(row)
        if self.fmt == "prompt_completion":
            return self._prompt_completion(row)
        text = self._required_text(row, "text")
        return PlainText(text)

    def read_prompt(self, row: Mapping[str, Any]) -> Conversation:
        """The messages of a row to sample from, its answer included where it has one; other columns are for rewards."""
        if self.fmt != "prompt_completion":
            return self._conversation(row)
        messages, trained = as_messages(self._required(row, "prompt"), "user", self.keys)
        return _with_system(messages, trained, self._optional_text(row, "system"), self._tools(row))

    def refuse_unread(self, row: Mapping[str, Any]) -> None:
        """Raises RowError for a column that would change what is trained and that this format does not read."""
        self.keys.refuse(row, self.columns_read(), f"format {self.fmt}", TRAINING_COLUMNS)

    def columns_read(self) -> set[str]:
        """Columns that `read` looks at, and `rejected` for those who chose to train on `chosen` alone."""
        read = {self.columns.get(field, field) for field in ALL_FIELDS[self.fmt]}
        if "messages" in ALL_FIELDS[self.fmt] and "messages" not in self.columns:
            read.update(LIST_COLUMNS)
        left_out = {field for field, column in self.columns.items() if not column}
        return read | left_out | ({"rejected"} if "chosen" in self.columns.values() else set())

    def _column(self, field: str, row: Mapping[str, Any]) -> str:
        if field in self.columns:
            return self.columns[field]
        if field == "messages":
            return next((c for c in LIST_COLUMNS if c in row), field)
        return field

    def _required(self, row: Mapping[str, Any], field: str) -> tuple[str, Any]:
        column = self._column(field, row)
        if column not in row:
            has = ", ".join(row) or "none"
            raise RowError("missing_column", f"no column {column!r} for {field} (the row has: {has})")
        return column, row[column]

    def _required_text(self, row: Mapping[str, Any], field: str) -> str:
        column, value = self._required(row, field)
        if not isinstance(value, str):
            raise RowError("not_text", f"{column} is {type(value).__name__}, not text")
        if not value.strip():
            raise RowError("empty", f"{column} is empty")
        return value

    def _optional_text(self, row: Mapping[str, Any], field: str) -> str:
        column = self._column(field, row)
        value = row.get(column)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise RowError("not_text", f"{column} is {type(value).__name__}, not text")
        return value

    def _tools(self, row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        column = self._column("tools", row)
        value = row.get(column)
        if isinstance(value, str) and value.strip():
            value = json_value(value, column, "bad_tools")
        if not value:
            return None
        if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
            raise RowError("bad_tools", f"{column} is {type(value).__name__}, not a list of tool descriptions")
        return value

    def _conversation(self, row: Mapping[str, Any]) -> Conversation:
        column, value = self._required(row, "messages")
        messages, trained = read_messages(value, column, self.keys)
        return _with_system(messages, trained, self._optional_text(row, "system"), self._tools(row))

    def _alpaca(self, row: Mapping[str, Any]) -> Document:
        question = self._required_text(row, "instruction")
        extra = self._optional_text(row, "input")
        if extra.strip():
            question = f"{question}\n{extra}"
        answer = self._required_text(row, "output")
        messages: list[dict[str, Any]] = []
        for turn, pair in enumerate(row.get(self._column("history", row)) or []):
            if not (isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(t, str) for t in pair)):
                raise RowError("bad_history", f"history[{turn}] is not a pair of texts")
            messages += [_turn("user", pair[0]), _turn("assistant", pair[1])]
        messages += [_turn("user", question), _turn("assistant", answer)]
        return self.chat_or_text(messages, self._optional_text(row, "system"), None)

    def _prompt_completion(self, row: Mapping[str, Any]) -> Document:
        prompt, completion = self._required(row, "prompt"), self._required(row, "completion")
        before, _ = as_messages(prompt, "user", self.keys)
        after, wanted = as_messages(completion, "assistant", self.keys)
        if not isinstance(prompt[1], str) and not self.chat:
            raise RowError(
                "no_template", f"{prompt[0]} holds messages, which need a chat template", fix=NO_TEMPLATE_FIX
            )
        if any(message["role"] != "assistant" for message in after):
            raise RowError("bad_role", f"{completion[0]} must hold assistant messages only")
        trained = [False] * len(before) + wanted
        return self.chat_or_text(before + after, self._optional_text(row, "system"), self._tools(row), trained)

    def chat_or_text(
        self,
        messages: list[dict[str, Any]],
        system: str,
        tools: list[dict[str, Any]] | None,
        trained: list[bool] | None = None,
    ) -> Document:
        """Turns when there is a template, else one prompt and its completion."""
        if self.chat:
            return _with_system(messages, trained or [m["role"] == "assistant" for m in messages], system, tools)
        if system or tools or len(messages) != 2 or any(message.keys() - {"role", "content"} for message in messages):
            raise RowError(
                "no_template",
                "system text, tools, reasoning and earlier turns need a chat template",
                fix=NO_TEMPLATE_FIX,
            )
        return Completion(messages[0]["content"], messages[1]["content"])


NO_TEMPLATE_FIX = "data.chat_template=<a .jinja file>, or a tokenizer with a chat template"


def _turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _with_system(
    messages: list[dict[str, Any]], trained: list[bool], system: str, tools: list[dict[str, Any]] | None
) -> Conversation:
    if system.strip() and messages[0]["role"] != "system":
        return Conversation([_turn("system", system), *messages], [False, *trained], tools)
    if system.strip() and messages[0]["content"].strip() != system.strip():
        raise RowError(
            "two_systems",
            "the row has a system text, and its messages begin with another one",
            fix="data.ignore_columns=[system] to take that of the messages",
        )
    return Conversation(messages, trained, tools)


def as_messages(
    field: tuple[str, Any], role: str, keys: KnownKeys = NO_OTHER_KEYS
) -> tuple[list[dict[str, Any]], list[bool]]:
    """Text, one message or a list of messages (the prompt or completion of conversational data) as messages."""
    column, value = field
    if isinstance(value, str):
        if not value.strip():
            raise RowError("empty", f"{column} is empty")
        return [_turn(role, value)], [role == "assistant"]
    return read_messages([value] if isinstance(value, dict) else value, column, keys)


def read_messages(value: Any, column: str, keys: KnownKeys = NO_OTHER_KEYS) -> tuple[list[dict[str, Any]], list[bool]]:
    """OpenAI (`role`, `content`) or sharegpt (`from`, `value`) messages as template messages, and which are trained.

    Trained are assistant messages without `train: false` (or the `weight: 0` of OpenAI files). Raises RowError naming
    the message by its index.
    """
    if not isinstance(value, list):
        raise RowError("not_messages", f"{column} is {type(value).__name__}, not a list of messages")
    if not value:
        raise RowError("empty", f"{column} is empty")
    messages, trained = [], []
    for index, item in enumerate(value):
        where = f"{column}[{index}]"
        if not isinstance(item, dict):
            raise RowError("not_messages", f"{where} is {type(item).__name__}, not a message")
        item = {key: entry for key, entry in item.items() if entry is not None}
        sharegpt = "from" in item and "role" not in item
        item = keys.kept(item, SHAREGPT_KEYS if sharegpt else MESSAGE_KEYS, where)
        message = _from_sharegpt(item, where) if sharegpt else _from_openai(item, where, keys)
        trained.append(_is_trained(item, message["role"], where))
        messages.append(message)
    link_answers(messages, column)
    return messages, trained


def _is_trained(item: Mapping[str, Any], role: str, where: str) -> bool:
    flag = item.get("train", item.get("weight", role == "assistant"))
    if flag not in (0, 1):
        raise RowError("bad_train", f"{where}.train is {flag!r}, not true or false")
    if flag and role != "assistant":
        raise RowError(
            "bad_train", f"{where}.train is true, but its role is {role!r}: only assistant turns can be trained"
        )
    return bool(flag)


def _from_openai(item: Mapping[str, Any], where: str, keys: KnownKeys) -> dict[str, Any]:
    if "role" not in item:
        raise RowError("no_role", f"{where} has no 'role' (its keys: {', '.join(item) or 'none'})")
    role = item["role"]
    if role not in ROLES:
        fix = "rename the role to 'tool' (a tool's answer)" if role == "function" else None
        raise RowError("bad_role", f"{where}.role is {role!r}; known roles: {', '.join(ROLES)}", fix=fix)
    message = {key: value for key, value in item.items() if key not in ("train", "weight")}
    for key in (*REASONING_KEYS, "name", "tool_call_id"):
        if not isinstance(message.get(key, ""), str):
            raise RowError("not_text", f"{where}.{key} is {message[key]!r}, not text")
    if "tool_calls" in message:
        message["tool_calls"] = read_calls(message["tool_calls"], f"{where}.tool_calls")
    message["content"] = _content(item.get("content", ""), where, keys)
    spoken = message["content"].strip() or message.get("tool_calls") or any(map(message.get, REASONING_KEYS))
    if role == "assistant" and not spoken:
        raise RowError("empty", f"{where} is an assistant message without content or tool calls")
    if role != "assistant":
        for key in ("tool_calls", *REASONING_KEYS):
            if message.get(key):
                raise RowError("bad_role", f"{where} has {key}, but its role is {role!r}: only assistants have them")
    return message


def _content(value: Any, where: str, keys: KnownKeys) -> str:
    """Text, or OpenAI's list of text parts joined."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = []
        for i, part in enumerate(value):
            if not (isinstance(part, dict) and isinstance(part.get("text"), str)):
                kind = part.get("type", "unknown") if isinstance(part, dict) else type(part).__name__
                raise RowError("not_text", f"{where}.content[{i}] is a part of type {kind!r}; only text is supported")
            keys.kept(part, PART_KEYS, f"{where}.content[{i}]")
            parts.append(part["text"])
        return "".join(parts)
    raise RowError("not_text", f"{where}.content is {type(value).__name__}, not text")


def _from_sharegpt(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    speaker, value = item["from"], item.get("value")
    if speaker not in SHAREGPT_ROLES:
        raise RowError("bad_role", f"{where}.from is {speaker!r}; known: {', '.join(SHAREGPT_ROLES)}")
    if not isinstance(value, str):
        raise RowError("not_text", f"{where}.value is {type(value).__name__}, not text")
    role = SHAREGPT_ROLES[speaker]
    if speaker in ("function_call", "tool_call"):
        calls = json_value(value, f"{where}.value", "bad_tool_call")
        calls = read_calls(calls if isinstance(calls, list) else [calls], f"{where}.value")
        return {"role": role, "content": "", "tool_calls": calls}
    if role == "assistant" and not value.strip():
        raise RowError("empty", f"{where} is an assistant message without content")
    return _turn(role, value)
