"""Convert tool calls and their results to the form of chat templates, and describe invalid ones."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

from automodel_cli.data.formats.examples import Message
from automodel_cli.data.json_reader import parse_json
from automodel_cli.data.row_errors import RowError

CALL_KEYS = frozenset({"id", "type", "function", "index"})
FUNCTION_KEYS = frozenset({"name", "arguments"})


def read_calls(calls: object, where: str) -> list[Message]:
    """Return the calls of one message: `type`, `function` with `name` and `arguments` as an object, and `id` if
    present.

    OpenAI writes arguments as JSON text. Templates write an object out as JSON again. Raises RowError naming the
    call by its index.
    """
    if not isinstance(calls, list):
        raise RowError("bad_tool_call", f"{where} is {type(calls).__name__}, not a list of calls")
    return [_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _call(value: object, where: str) -> Message:
    call: Message = {key: item for key, item in value.items() if item is not None} if isinstance(value, dict) else {}
    if "function" not in call and "name" in call:  # as some templates write them
        given = {key: value for key, value in call.items() if key not in FUNCTION_KEYS}
        call = {**given, "function": {key: call[key] for key in FUNCTION_KEYS if key in call}}
    match call:
        case {"function": {"name": _}}:
            pass
        case _:
            raise RowError("bad_tool_call", f"{where} has no function with a name")
    kind = call.get("type", "function")
    if kind != "function":
        raise RowError("bad_tool_call", f"{where}.type is {kind!r}, but must be 'function'")
    if not isinstance(call.get("id", ""), str):
        raise RowError("bad_tool_call", f"{where}.id is {call['id']!r}, not text")
    for name, keys, known in ((where, call, CALL_KEYS), (f"{where}.function", call["function"], FUNCTION_KEYS)):
        stray = [key for key in keys if key not in known]
        if stray:
            raise RowError(
                "bad_tool_call", f"{name} has the key {stray[0]!r}, which no template reads", fix="remove it"
            )
    return {**call, "type": "function", "function": _function(call["function"], f"{where}.function")}


def _function(function: Message, where: str) -> Message:
    name, arguments = function["name"], function.get("arguments")
    if not (isinstance(name, str) and name.strip()):
        raise RowError("bad_tool_call", f"{where}.name is {name!r}, but must be a nonempty string")
    if arguments is None:
        raise RowError("bad_tool_call", f"{where} ({name!r}) has no arguments", fix='add "arguments": {}')
    if isinstance(arguments, str):
        arguments = json_value(arguments.strip() or "{}", f"{where}.arguments", "bad_tool_call")
    if not isinstance(arguments, dict):
        raise RowError("bad_tool_call", f"{where}.arguments is {type(arguments).__name__}, not an object")
    return {"name": name, "arguments": arguments}


def json_value(text: str, where: str, code: str) -> object:
    """The value that JSON text holds. Raises RowError with the reason and the column."""
    try:
        return parse_json(text)
    except RowError as error:
        reason = error.message.removeprefix("not JSON: ")
        what = f"{where} is not JSON" if error.code == "not_json" else where
        raise RowError(code, f"{what}: {reason}") from error


def link_answers(messages: Sequence[Message], column: str) -> None:
    """Add missing `id`s to calls and the matching `tool_call_id` to their results, in place and in order.

    An id has nine letters and digits, which every template accepts. It is derived from the call, so equal rows stay
    equal.
    Raises RowError for a result without `tool_call_id` if the calls have ids.
    """
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") or []
        end = index + 1
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        answers = messages[index + 1 : end] if calls else []
        named = [call["id"] for call in calls if call.get("id")]
        if calls and not named:
            answer_ids = [answer.get("tool_call_id") for answer in answers]
            for place, call in enumerate(calls):
                answer_id = answer_ids[place] if place < len(answer_ids) else None
                call["id"] = answer_id or _made_id(index, place, call)
        for place, answer in enumerate(answers):
            if answer.get("tool_call_id"):
                continue
            where = f"{column}[{index + 1 + place}]"
            if named:
                listed = ", ".join(map(repr, named))
                raise RowError(
                    "no_tool_call_id",
                    f"{where} is a tool result without tool_call_id; the preceding calls have the ids {listed}",
                    fix=f'add "tool_call_id": "{named[min(place, len(named) - 1)]}"',
                )
            if place >= len(calls):
                raise RowError(
                    "no_tool_call_id",
                    f"{where} is tool result {place + 1}, but only {len(calls)} calls precede it",
                )
            answer["tool_call_id"] = calls[place]["id"]


def _made_id(*of: object) -> str:
    return hashlib.blake2b(json.dumps(of).encode(), digest_size=5).hexdigest()[:9]


class ArgumentForm:
    """Form of arguments that one template expects: an object, or JSON text if it concatenates them (DeepSeek-V3).

    Detected by rendering the first row with arguments. Text is required if an object raises an exception, or is
    rendered as a Python dict.
    """

    def __init__(self) -> None:
        self.text: bool | None = None

    def formed(self, messages: list[Message], render: Callable[[list[Message]], str]) -> list[Message]:
        """The messages with arguments in the form that the template renders."""
        passed = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]
        if not any(passed) or self.text is False:
            return messages
        in_text = with_text_arguments(messages)
        if self.text is None:
            objects = _rendered(render, messages)
            shown_as_dict = objects is not None and any(str(item) in objects for item in passed if item)
            if objects is not None and not shown_as_dict:
                self.text = False
            elif _rendered(render, in_text) is not None:
                self.text = True
        return in_text if self.text else messages


def _rendered(render: Callable[[list[Message]], str], messages: list[Message]) -> str | None:
    try:
        return render(messages)
    except RowError:
        return None


def with_text_arguments(messages: Sequence[Message]) -> list[Message]:
    """The messages with the arguments of calls as JSON text."""
    return [
        {**message, "tool_calls": [_in_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _in_text(call: Message) -> Message:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
