"""Render conversations with a chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from automodel_cli.config.errors import DataError
from automodel_cli.data.chat.multi_turn import reasoning_key, with_key
from automodel_cli.data.chat.time_limit import time_limit
from automodel_cli.data.formats.examples import Conversation, Message, Messages
from automodel_cli.data.formats.tool_calls import ArgumentForm
from automodel_cli.data.pictures.rows import content_parts
from automodel_cli.data.row_errors import RowError, attempt, unwrap

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
RENDER_SECONDS = 60.0
"""Time limit of one call of the renderer. One second is added per conversation."""
RENDER_FIX = "data.chat_template=chatml, or a template whose loops end"


class ChatRenderer:
    """Renderer of conversations with one template. Picklable, for worker processes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, *, pictures: bool = False):
        """Create a renderer.

        Args:
            tokenizer: a tokenizer of transformers.
            template: the chat template.
            pictures: rows can have pictures, whose templates may read content as a list of parts only.
        """
        self.tokenizer, self.template, self.arguments = tokenizer, template, ArgumentForm()
        self.reasoning_key = reasoning_key(template)
        self.parts_only = pictures and self._ignores_text()

    def _ignores_text(self) -> bool:
        """Return whether the template renders content in parts and omits content that is a string."""
        word, self.parts_only = "qzxwordxzq", False
        return word not in str(attempt(self._render_text, [{"role": "user", "content": word}], None))

    def render(self, chat: Conversation) -> str:
        """Return the text of a conversation. Raises RowError with the error of the template."""
        chat = self._formed(chat)
        return self._render_text(chat.messages, chat.tools)

    def render_messages(self, messages: Messages, tools: Messages | None) -> str:
        """Return the text of unmodified messages. Raises RowError like `render`."""
        return self._render_text(messages, tools)

    def _render(self, jobs: Sequence[tuple[Conversation, int, bool]]) -> list[str | RowError]:
        """Render the first n messages of each job `(conversation, n, add_generation_prompt)`."""
        texts = {}
        for prompt in (False, True):
            prefixes = [(chat.messages[:count], chat.tools) for chat, count, flag in jobs if flag == prompt]
            rendered = self._apply_many(prefixes, partial(self._texts, add_generation_prompt=prompt))
            texts[prompt] = iter(rendered)
        return [next(texts[prompt]) for _, _, prompt in jobs]

    def _apply_many(
        self,
        asked: Sequence[tuple[Messages, Messages | None]],
        apply: Callable[[list[Messages], Messages | None], list[T]],
    ) -> list[T | RowError]:
        """Render all conversations without tools in one call, which is ten times as fast as one call each."""

        def alone(messages: Messages, tools: Messages | None) -> T:
            return apply([messages], tools)[0]

        try:
            together = iter(apply([messages for messages, tools in asked if tools is None], None))
        except RowError:  # one of them failed
            return [attempt(alone, messages, tools) for messages, tools in asked]
        return [next(together) if tools is None else attempt(alone, messages, tools) for messages, tools in asked]

    def _texts(self, conversations: list[Messages], tools: Messages | None, **options: Any) -> list[str]:
        texts: list[str] = self._apply(conversations, tools, tokenize=False, **options)
        return texts

    def _apply(self, conversations: list[Messages], tools: Messages | None, **options: Any) -> Any:
        """Return the result of `apply_chat_template`. Errors of the template become RowError."""
        if not conversations:
            return []
        options = {"chat_template": self.template, "tools": tools, **options}
        conversations = [[self._with_parts(m) for m in messages] for messages in conversations]
        if self.reasoning_key is not None:
            conversations = [[with_key(m, self.reasoning_key) for m in messages] for messages in conversations]
        try:
            with time_limit(RENDER_SECONDS + len(conversations), "the chat template", RENDER_FIX):
                return self.tokenizer.apply_chat_template(conversations, **options)
        except DataError:
            raise
        except Exception as error:  # jinja errors, and TypeError, KeyError, ... from values of the row
            reason = str(error).strip() or type(error).__name__
            raise RowError("template_error", f"the chat template raised an error for the row: {reason}") from error

    def _with_parts(self, message: Message) -> Message:
        """Return the message with image parts in the place of marks, and in parts if the template needs them."""
        content = content_parts(message["content"])
        if self.parts_only and isinstance(content, str):
            content = [{"type": "text", "text": content}]
        return message if content is message["content"] else {**message, "content": content}

    def _render_text(self, messages: Messages, tools: Messages | None) -> str:
        return self._texts([messages], tools)[0]

    def _formed(self, chat: Conversation) -> Conversation:
        """Return the conversation with tool arguments in the form that the template expects: text or an object."""
        messages = self.arguments.formed(chat.messages, lambda other: self._render_text(other, chat.tools))
        return chat if messages is chat.messages else replace(chat, messages=messages)


def check_alike(own: str | RowError, ours: str | RowError) -> None:
    """Raise RowError if the first turn of a row differs between the two templates."""
    if own != ours and unwrap(own) != unwrap(ours):
        raise RowError(
            "other_template",
            "the tokenizer's chat template and the training template render the first turn of this row differently",
            fix="data.multi_turn=per_turn, or data.chat_template=tokenizer",
        )
