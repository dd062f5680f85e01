"""Convert text, OpenAI messages and ShareGPT messages to messages for chat templates. Torch-free."""

from __future__ import annotations

import re
from typing import Any

from automodel_cli.data.formats.examples import AnsweredPrompt, Conversation, Document, Message, Messages
from automodel_cli.data.formats.tool_calls import json_value, link_answers, read_calls
from automodel_cli.data.formats.unused_columns import NO_OTHER_KEYS, AllowedKeys
from automodel_cli.data.json_reader import parse_json
from automodel_cli.data.row_errors import RowError, attempt

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
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
MESSAGE_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", "train", "weight", *REASONING_KEYS})
SHAREGPT_KEYS = frozenset({"from", "value", "train", "weight"})
PART_KEYS = frozenset({"type", "text"})
_ARRAY_OF_OBJECTS = re.compile(r"\s*\[\s*\{")
NO_TEMPLATE_FIX = "data.chat_template=<a .jinja file>, or a tokenizer with a chat template"


def turn(role: str, content: str) -> Message:
    """One message."""
    return {"role": role, "content": content}


def with_system(messages: Messages, trained: list[bool], system: str, tools: Messages | None) -> Conversation:
    """Return the conversation with the system text of a separate column in front. Raises RowError if it has another."""
    if system.strip() and messages[0]["role"] != "system":
        return Conversation([turn("system", system), *messages], [False, *trained], tools)
    if system.strip() and messages[0]["content"].strip() != system.strip():
        raise RowError(
            "two_systems",
            "the system column and the first message contain different system prompts",
            fix="data.ignored_columns=[system] to use the system message",
        )
    return Conversation(messages, trained, tools)


def chat_or_text(
    messages: Messages,
    trained: list[bool],
    system: str,
    tools: Messages | None,
    *,
    chat: bool,
) -> Document:
    """Turns when there is a template (`chat`), else one prompt and its completion. RowError: it needs a template."""
    if chat:
        return with_system(messages, trained, system, tools)
    if system or tools or len(messages) != 2 or any(message.keys() - {"role", "content"} for message in messages):
        raise RowError(
            "no_template",
            "a system prompt, tools, reasoning and earlier turns require a chat template",
            fix=NO_TEMPLATE_FIX,
        )
    return AnsweredPrompt(messages[0]["content"], messages[1]["content"])


def messages_in(value: object) -> object:
    """Parse a list of messages from JSON text, as tables without nested columns (csv) store it. Other values pass."""
    if not isinstance(value, str) or not _ARRAY_OF_OBJECTS.match(value):
        return value
    match attempt(parse_json, value):
        case list() as parsed if all(map(_is_message, parsed)):
            return parsed
    return value


def _is_message(item: object) -> bool:
    match item:
        case {"role": _, "content": _} | {"from": _, "value": _}:
            return True
    return False


def as_messages(field: tuple[str, object], role: str, keys: AllowedKeys = NO_OTHER_KEYS) -> tuple[Messages, list[bool]]:
    """Text, one message or a list of messages (the prompt or completion of conversational data) as messages."""
    column, value = field
    match messages_in(value):
        case str(text):
            if not text.strip():
                raise RowError("empty", f"{column} is empty")
            return [turn(role, text)], [role == "assistant"]
        case dict() as message:
            return read_messages([message], column, keys)
    return read_messages(value, column, keys)


def read_messages(value: object, column: str, keys: AllowedKeys = NO_OTHER_KEYS) -> tuple[Messages, list[bool]]:
    """OpenAI (`role`, `content`) or sharegpt (`from`, `value`) messages as template messages, and which are trained.

    Trained are assistant messages without `train: false` (or the `weight: 0` of OpenAI files). Raises RowError naming
    the message by its index.
    """
    value = messages_in(value)
    if isinstance(value, str) and value.lstrip()[:1] == "[":  # of a table that holds text only
        value = json_value(value, column, "not_messages")
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


def _is_trained(item: Message, role: str, where: str) -> bool:
    flag = item.get("train", item.get("weight", role == "assistant"))
    if flag not in (0, 1):
        raise RowError("bad_train", f"{where}.train is {flag!r}, but must be true or false")
    if flag and role != "assistant":
        raise RowError(
            "bad_train", f"{where}.train is true, but only assistant messages can be trained (role {role!r})"
        )
    return bool(flag)


def _from_openai(item: Message, where: str, keys: AllowedKeys) -> Message:
    if "role" not in item:
        raise RowError("no_role", f"{where} has no 'role' (its keys: {', '.join(item) or 'none'})")
    role = item["role"]
    if role not in ROLES:
        fix = "rename the role to 'tool'" if role == "function" else None
        raise RowError("bad_role", f"{where}.role is {role!r}, but must be one of: {', '.join(ROLES)}", fix=fix)
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
                raise RowError(
                    "bad_role", f"{where} has {key}, but only assistant messages can have it (role {role!r})"
                )
    return message


def _content(value: object, where: str, keys: AllowedKeys) -> str:
    """Text, or OpenAI's list of text parts joined."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(_part(part, f"{where}.content[{i}]", keys) for i, part in enumerate(value))
    raise RowError("not_text", f"{where}.content is {type(value).__name__}, not text")


def _part(part: Any, where: str, keys: AllowedKeys) -> str:
    match part:
        case {"text": str(text)}:
            keys.kept(part, PART_KEYS, where)
            return text
        case {"type": kind}:
            pass
        case {**_others}:
            kind = "unknown"
        case _:
            kind = type(part).__name__
    raise RowError("not_text", f"{where} has type {kind!r}, but only text is supported")


def _from_sharegpt(item: Message, where: str) -> Message:
    speaker, value = item["from"], item.get("value")
    if speaker not in SHAREGPT_ROLES:
        raise RowError("bad_role", f"{where}.from is {speaker!r}, but must be one of: {', '.join(SHAREGPT_ROLES)}")
    if not isinstance(value, str):
        raise RowError("not_text", f"{where}.value is {type(value).__name__}, not text")
    role = SHAREGPT_ROLES[speaker]
    if speaker in ("function_call", "tool_call"):
        calls = json_value(value, f"{where}.value", "bad_tool_call")
        calls = read_calls(calls if isinstance(calls, list) else [calls], f"{where}.value")
        return {"role": role, "content": "", "tool_calls": calls}
    if role == "assistant" and not value.strip():
        raise RowError("empty", f"{where} is an assistant message without content")
    return turn(role, value)
