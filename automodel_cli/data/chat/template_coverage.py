"""Check that a rendered conversation contains every part of its row.

Templates without a branch for a role, for tool calls or for reasoning omit them without an error, and an empty turn
would be trained. Two checks find omitted parts:

1. Every row: each string of the row occurs in the text, verbatim or escaped, ignoring white space.
2. Once per shape of conversation (roles, keys, number of calls): a unique marker is inserted into every string, and
   each marker must occur in the text. This finds parts that occur elsewhere too, for example a function name that is
   also in the list of tools.

Before a row is rejected, each suspect string is tested separately with the marker at its start, middle and end. Strings
that the template only rewrites therefore pass. Reasoning of earlier untrained turns may be missing, because the model
does not see it at inference either.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from automodel_cli.data.formats.examples import Conversation, Message, Messages
from automodel_cli.data.formats.messages import REASONING_KEYS
from automodel_cli.data.pictures.rows import split_marks
from automodel_cli.data.row_errors import RowError

Path = tuple[object, ...]
Render = Callable[[Messages, Messages | None], str]
THINK_END = "</think>"
KEY = object()
"""Marks the end of a path to a key. Without it, the path leads to the value."""
_FREE_KEYS = frozenset({"role", "tool_call_id", "train", "weight", "name"})
"""Keys that templates need not render. `name` is checked if the message is not a tool result."""


@dataclass(frozen=True)
class Slot:
    """A string of the row: its path, the part that must be rendered, and its label in error messages."""

    path: Path
    start: int
    text: str
    label: str
    code: str = "dropped_by_template"
    fix: str = ""


@dataclass
class RenderedCheck:
    """Both checks for one template. Shapes that passed are remembered."""

    whole_shapes: set[object] = field(default_factory=set)

    def check(self, chat: Conversation, text: str, trained: Collection[int], render: Render) -> None:
        """Raise RowError naming the first string of the row that is missing in `text`.

        `trained`: messages whose reasoning must be rendered too. `render` renders other messages and tools.
        """
        slots = list(_slots(chat, trained))
        suspects = [slot for slot in slots if not _stands(slot.text, text)]
        shape = _shape(chat, trained)
        if shape not in self.whole_shapes:
            suspects += self._lost_words(chat, slots, render)
        for slot in slots:
            if slot in suspects and not self._comes_out(chat, slot, text, render):
                raise _left_out(slot)
        self.whole_shapes.add(shape)

    def _lost_words(self, chat: Conversation, slots: Sequence[Slot], render: Render) -> list[Slot]:
        words = {slot.path + (slot.start,): _word(i) for i, slot in enumerate(slots)}
        text = _try(render, chat, {slot: (words[slot.path + (slot.start,)], len(slot.text)) for slot in slots})
        return [] if text is None else [slot for slot in slots if words[slot.path + (slot.start,)] not in text]

    def _comes_out(self, chat: Conversation, slot: Slot, text: str, render: Render) -> bool:
        """Return whether a marker at the start, in the middle and at the end of this string is rendered each time."""
        for at in {0, len(slot.text) // 2, len(slot.text)}:
            marked = _try(render, chat, {slot: (_word(0), at)})
            if marked is None:  # the template validates this string, so search the text instead
                return _stands(slot.text, text)
            if _word(0) not in marked:
                return False
        return True


def _word(number: int) -> str:
    """Return a marker of letters and digits that no row contains and no escaping changes."""
    return f"qzx{number}xzq"


def _try(render: Render, chat: Conversation, words: Mapping[Slot, tuple[str, int]]) -> str | None:
    """Return the text with markers inserted into slots, in lower case, or None if the template raises."""
    places: dict[Path, list[tuple[int, str]]] = {}
    for slot, (word, at) in words.items():
        places.setdefault(slot.path, []).append((slot.start + at, word))
    try:
        return render(_marked(chat.messages, places, ("messages",)), _marked(chat.tools, places, ("tools",))).lower()
    except RowError:
        return None


def _marked(value: object, places: Mapping[Path, list[tuple[int, str]]], path: Path) -> Any:
    """Return a copy with the markers of `places` inserted."""
    match value:
        case str():
            for at, word in sorted(places.get(path, ()), reverse=True):
                value = value[:at] + word + value[at:]
        case list():
            return [_marked(item, places, (*path, i)) for i, item in enumerate(value)]
        case dict():
            copy = {_marked(k, places, (*path, k, KEY)): _marked(v, places, (*path, k)) for k, v in value.items()}
            name = (*path, "function", "name")
            match value:  # an id such as `functions.name:0`, which some templates read
                case {"id": str(number), "function": {"name": plain}} if name in places:
                    copy["id"] = number.replace(plain, _marked(plain, places, name))
            return copy
    return value


# -- strings of a row


def _slots(chat: Conversation, trained: Collection[int]) -> Iterator[Slot]:
    yield from _tool_slots(chat.tools or ())
    for index, message in enumerate(chat.messages):
        path: Path = ("messages", index)
        for key, value in message.items():
            if key == "content":
                yield from _content_slots(message, index, index in trained)
            elif key in REASONING_KEYS:
                if index in trained:
                    fix = f"data.ignored_columns=[{key}] to train without it, or a data.chat_template that renders it"
                    yield from _slot((*path, key), value, f"the {key} of message {index}", fix=fix)
            elif key == "tool_calls":
                for number, call in enumerate(value):
                    yield from _call_slots(call, (*path, key, number), index)
            elif key not in _FREE_KEYS or (key == "name" and message["role"] != "tool"):
                fix = f"data.ignored_columns=[{key}] to train without it"
                for at, text in _strings(value, (*path, key)):
                    yield from _slot(at, text, f"{key!r} of message {index}", fix=fix)


def _content_slots(message: Message, index: int, trained: bool) -> Iterator[Slot]:
    """Yield the content. For an assistant message with inline reasoning: the reasoning (if trained) and the rest."""
    content, role = message["content"], message["role"]
    path: Path = ("messages", index, "content")
    fix = "data.chat_template=<a template that renders this role>, or rename the role in the data"
    thought, end, answer = content.rpartition(THINK_END)
    label = f"message {index} (role {role!r}"
    if role != "assistant" or not end:
        for start, piece in split_marks(content):
            yield from _slot(path, piece, label, start=start, fix=fix)
        return
    if trained:
        start = thought.find("<think>") + len("<think>") if "<think>" in thought else 0
        fix = "data.chat_template=<a template that keeps what stands before </think>>, or remove it from the data"
        yield from _slot(path, thought[start:], f"the thought of message {index}", start=start, fix=fix)
    yield from _slot(path, answer, label, start=len(thought) + len(end), fix=fix)


def _call_slots(call: Message, path: Path, index: int) -> Iterator[Slot]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    fix = "data.chat_template=<a template that renders tool_calls>, or take rows with calls out of the data"
    here: Path = (*path, "function")
    yield from _slot((*here, "name"), name, f"the tool call {name!r} of message {index}", fix=fix)
    for at, text in _strings(arguments, (*here, "arguments")):
        yield from _slot(at, text, f"arguments of the tool call {name!r} of message {index}", fix=fix)


def _tool_slots(tools: Sequence[Message]) -> Iterator[Slot]:
    """Yield name and description of each tool, and the names of its parameters."""
    for number, tool in enumerate(tools):
        path: Path = ("tools", number)
        match tool:
            case {"function": {**function}}:
                path = (*path, "function")
            case function:
                pass
        required: list[tuple[Path, object]] = [((*path, key), function.get(key)) for key in ("name", "description")]
        match function:
            case {"parameters": {"properties": {**properties}}}:
                required += [((*path, "parameters", "properties", name, KEY), name) for name in properties]
        for at, text in required:
            if isinstance(text, str):
                yield from _slot(at, text, "", code="tools_ignored")


def _slot(path: Path, text: str, label: str, *, start: int = 0, code: str = "", fix: str = "") -> Iterator[Slot]:
    stripped = text.strip()
    if stripped:
        yield Slot(path, start + text.index(stripped), stripped, label, code or "dropped_by_template", fix)


def _strings(value: object, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield every string and every key of a value, with its path."""
    match value:
        case str():
            yield path, value
        case list():
            for i, item in enumerate(value):
                yield from _strings(item, (*path, i))
        case dict():
            for key, item in value.items():
                yield (*path, key, KEY), key
                yield from _strings(item, (*path, key))


def _shape(chat: Conversation, trained: Collection[int]) -> object:
    """Return the features by which a template can distinguish conversations without reading their strings."""
    messages = tuple(
        (
            message["role"],
            i in trained,
            not message["content"].strip(),
            THINK_END in message["content"],
            tuple(key for key, value in message.items() if value and key not in ("role", "content")),
            len(message.get("tool_calls", ())),
        )
        for i, message in enumerate(chat.messages)
    )
    return messages, len(chat.tools or ())


# -- the rendered text


def _stands(said: str, text: str) -> bool:
    """Return whether the text contains a string, unchanged or escaped as JSON, Python or HTML, ignoring white space."""
    if said in text:
        return True
    everything = "".join(text.split())
    return any("".join(form.split()) in everything for form in _forms(said))


def _forms(said: str) -> Iterator[str]:
    yield said
    plain, escaped = json.dumps(said, ensure_ascii=False)[1:-1], json.dumps(said)[1:-1]
    yield from (plain, escaped, json.dumps(plain, ensure_ascii=False)[1:-1], json.dumps(escaped)[1:-1])
    yield from (repr(said)[1:-1], html.escape(said), html.escape(said, quote=False))


def _left_out(slot: Slot) -> RowError:
    head = slot.text if len(slot.text) <= 40 else f"{slot.text[:36]} ..."
    if slot.code == "tools_ignored":
        return RowError(
            slot.code,
            f"the chat template does not render the tools of the row ({head!r} is missing)",
            fix="data.chat_template=<a template with tools>, or data.column_mapping.tools='' to train without them",
        )
    shown = f", {head!r})" if "(" in slot.label else f" ({head!r})"
    return RowError(slot.code, f"the chat template does not render {slot.label}{shown}", fix=slot.fix)
