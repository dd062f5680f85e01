"""Which chat template renders the training rows.

By default (`data.multi_turn=auto`) the tokenizer's template is used, because it renders the text at inference too.

A template that rewrites earlier turns cannot render a conversation as one document. With `data.multi_turn=single`, a
bundled training template replaces it. The replacement renders a single turn exactly as the tokenizer's template does,
and each turn of a conversation as if it were the last. It is selected by comparing rendered text, not by model name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_cli.config.errors import DataError
from automodel_cli.data.chat.encoder import GENERATION_TAG, ChatEncoder
from automodel_cli.data.chat.multi_turn import reasoning_key, with_key
from automodel_cli.data.chat.renderer import RENDER_FIX, RENDER_SECONDS
from automodel_cli.data.chat.time_limit import time_limit
from automodel_cli.data.config import Turns
from automodel_cli.data.formats.examples import Conversation, Messages
from automodel_cli.data.row_errors import usable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OPENED, _EMPTY = "'<think>\\n'", "'<think>\\n\\n</think>\\n\\n'"
VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    "gpt-oss": ("gpt_oss", {}),
    "qwen3": ("qwen3", {}),
    "qwen3.5": ("qwen3_5", {"values_as_json": "false", "cue": _OPENED}),
    "qwen3.5 without thinking": ("qwen3_5", {"values_as_json": "false", "cue": _EMPTY}),
    "qwen3.6": ("qwen3_5", {"values_as_json": "true", "cue": _OPENED}),
    "deepseek": ("deepseek", {"cue": "''"}),
    "deepseek, thinking": ("deepseek", {"cue": _OPENED}),
    "nemotron-3": ("nemotron_3", {"closing": "'\\n</think>\\n'", "cue": _OPENED}),
    "nemotron-3-ultra": ("nemotron_3", {"closing": "'</think>'", "cue": _OPENED}),
}
"""Bundled training templates: name in reports, file, and a text that distinguishes related templates."""

_USER, _ANSWER = {"role": "user", "content": "What stands there?"}, {"role": "assistant", "content": "A tree."}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00000",
            "type": "function",
            "function": {"name": "look", "arguments": {"at": "the hill", "far": True, "how": {"often": 2}}},
        }
    ],
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a place.",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "description": "where"}, "far": {"type": "boolean"}},
            "required": ["at"],
        },
    },
}
_RESULT = {"role": "tool", "name": "look", "tool_call_id": "call00000", "content": "a tree"}
_SYSTEM = {"role": "system", "content": "Be brief."}
_REASON = {"reasoning_content": "The hill has one."}
PROBES: dict[str, tuple[Messages, Messages | None]] = {
    "answer": ([_USER, _ANSWER], None),
    "system": ([_SYSTEM, _USER, _ANSWER], None),
    "empty system": ([{**_SYSTEM, "content": ""}, _USER, _ANSWER], None),
    "reasoning": ([_USER, {**_ANSWER, **_REASON}], None),
    "reasoning in the text": ([_USER, {**_ANSWER, "content": "<think>\nThe hill has one.\n</think>\n\nA tree."}], None),
    "call": ([_USER, _CALL], None),
    "tools": ([_SYSTEM, _USER, _CALL], [_TOOL]),
    "result": ([_USER, {**_CALL, **_REASON}, _RESULT], None),
}
"""Conversations with one response. They have no earlier turn that a template could rewrite."""
_FOLLOW_UP: Messages = [_USER, _ANSWER, {"role": "user", "content": "And there?"}, {**_ANSWER, "content": "A rock."}]


@dataclass(frozen=True)
class ChosenTemplate:
    """The selected template. `text` renders the rows; None uses prompt and completion unchanged. `name` is set for a
    bundled template, which replaces `own`, the template of the tokenizer.
    """

    text: str | None
    name: str | None = None
    own: str | None = None


def choose_template(choice: str | None, tokenizer: PreTrainedTokenizerBase, turns: Turns) -> ChosenTemplate:
    """Return the template that `data.chat_template` and `data.multi_turn` select."""
    text = resolve_chat_template(choice, tokenizer)
    if choice not in (None, "auto") or turns != "single" or text is None or GENERATION_TAG.search(text):
        return ChosenTemplate(text)
    if _is_stable(tokenizer, text):
        return ChosenTemplate(text)
    name = find_training_template(tokenizer, text)
    return ChosenTemplate(text) if name is None else ChosenTemplate(training_template(name), name, text)


def resolve_chat_template(choice: str | None, tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the template text: the tokenizer's for `auto` and `tokenizer`, None for `none`, otherwise the content of a
    file or the text itself. Inference uses this template; training uses `choose_template`.
    """
    if choice in (None, "auto", "tokenizer"):
        template = tokenizer.chat_template
        if isinstance(template, dict):
            raise DataError(
                f"chat_template={choice or 'auto'} is ambiguous, because the tokenizer has several chat templates: "
                f"{', '.join(template)}",
                code="ambiguous",
                keys=("data.chat_template",),
                fix="data.chat_template=<a .jinja file with one of these templates>",
            )
        if template is None and choice == "tokenizer":
            raise DataError(
                "chat_template=tokenizer is not supported, because the tokenizer has no chat template",
                code="invalid_template",
                keys=("data.chat_template",),
                fix="data.chat_template=<a .jinja file>",
            )
        return str(template) if template is not None else None
    assert choice is not None, "handled above"
    if choice == "none":
        return None
    if "{%" in choice or "{{" in choice:
        return choice
    path = Path(choice).expanduser()
    if not path.is_file():
        raise DataError(
            f"chat_template={choice} must be one of: auto, tokenizer, none, the path of a file, or a template that "
            "contains {{ or {%",
            code="missing_file",
            keys=("data.chat_template",),
        )
    return path.read_text(encoding="utf-8")


@cache
def training_template(name: str) -> str:
    """Return the text of a bundled training template."""
    file, options = VARIANTS[name]
    head = "".join(f"{{%- set {key} = {value} %}}" for key, value in options.items())
    return head + files("automodel_cli.data.chat").joinpath("templates", f"{file}.jinja").read_text(encoding="utf-8")


def find_training_template(tokenizer: PreTrainedTokenizerBase, own: str) -> str | None:
    """Return the name of the bundled template that renders every probe as `own` does. None if there is none.

    A bundled template may reject probes in a format that it does not support. The plain response and the generation
    prompt must be equal.
    """
    expected = list(_renderings(tokenizer, own))
    for name in VARIANTS:
        candidate = list(_renderings(tokenizer, training_template(name)))
        alike = all(theirs is None or our in (None, theirs) for our, theirs in zip(candidate, expected, strict=True))
        if alike and candidate[0] is not None and candidate[-1] is not None:
            return name
    return None


def _renderings(tokenizer: PreTrainedTokenizerBase, template: str) -> Iterator[str | None]:
    key = reasoning_key(template)
    for messages, tools in [*PROBES.values(), ([_USER], None)]:
        named = [with_key(message, key) for message in messages] if key else messages
        options: dict[str, Any] = {"chat_template": template, "tools": tools, "tokenize": False}
        try:
            with time_limit(RENDER_SECONDS, "the chat template", RENDER_FIX):
                text = tokenizer.apply_chat_template(named, add_generation_prompt=len(messages) == 1, **options)
            yield str(text)
        except DataError:
            raise
        except Exception:  # templates raise anything
            yield None


def _is_stable(tokenizer: PreTrainedTokenizerBase, template: str) -> bool:
    """Whether a conversation of two plain turns can be one document."""
    encoder = ChatEncoder(tokenizer, template, "assistant", turns="single")
    trained = [message["role"] == "assistant" for message in _FOLLOW_UP]
    return bool(usable(encoder.encode([Conversation(_FOLLOW_UP, trained)])))
