"""Render conversations with a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from automodel_cli.config.errors import DataError
from automodel_cli.data.chat.multi_turn import reasoning_key, with_key
from automodel_cli.data.chat.time_limit import time_limit
from automodel_cli.data.formats.examples import Conversation
from automodel_cli.data.formats.tool_calls import ArgumentForm
from automodel_cli.data.pictures.rows import content_parts
from automodel_cli.data.row_errors import RowError, attempt

RENDER_SECONDS = 60.0
"""Time limit of one call of the renderer. One second is added per conversation."""
RENDER_FIX = "data.chat_template=chatml, or a template whose loops end"


class ChatRenderer:
    """Renderer of conversations with one template. Picklable, for worker processes."""

    def __init__(self, tokenizer: Any, template: str, *, pictures: bool = False):
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

    def render_messages(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        """Return the text of unmodified messages. Raises RowError like `render`."""
        return self._render_text(messages, tools)

    def _render(self, jobs: Sequence[tuple[Conversation, int, bool]]) -> list[str | RowError]:
        """Render the first n messages of each job `(conversation, n, add_generation_prompt)`."""
        out: list[Any] = [None] * len(jobs)
        for prompt in (False, True):
            places = [i for i, job in enumerate(jobs) if job[2] == prompt]
            prefixes = [(jobs[i][0].messages[: jobs[i][1]], jobs[i][0].tools) for i in places]
            texts = self._apply_many(prefixes, tokenize=False, add_generation_prompt=prompt)
            for place, text in zip(places, texts, strict=True):
                out[place] = text
        return out

    def _apply_many(self, asked: Sequence[tuple[list[Any], Any]], **options: Any) -> list[Any]:
        """Render all conversations without tools in one call, which is ten times as fast as one call each."""
        out: list[Any] = [None] * len(asked)
        together = [i for i, (_, tools) in enumerate(asked) if tools is None]
        try:
            for place, result in zip(
                together, self._apply([asked[i][0] for i in together], None, **options), strict=True
            ):
                out[place] = result
        except RowError:  # one of them failed: render them one by one below
            pass
        for i, (messages, tools) in enumerate(asked):
            if out[i] is None:
                results = attempt(self._apply, [messages], tools, **options)
                out[i] = results if isinstance(results, RowError) else results[0]
        return out

    def _apply(self, conversations: list[list[Any]], tools: Any, **options: Any) -> list[Any]:
        """Call `apply_chat_template`: returns texts or (ids, mask) pairs. Errors of the template become RowError."""
        if not conversations:
            return []
        options = {"chat_template": self.template, **options}
        conversations = [[self._with_parts(m) for m in messages] for messages in conversations]
        if self.reasoning_key is not None:
            conversations = [[with_key(m, self.reasoning_key) for m in messages] for messages in conversations]
        try:
            with time_limit(RENDER_SECONDS + len(conversations), "the chat template", RENDER_FIX):
                out = self.tokenizer.apply_chat_template(conversations, tools=tools, **options)
        except DataError:
            raise
        except Exception as error:  # jinja errors, and TypeError, KeyError, ... from values of the row
            reason = str(error).strip() or type(error).__name__
            raise RowError("template_error", f"the chat template raised an error for the row: {reason}") from error
        return out if isinstance(out, list) else list(zip(out["input_ids"], out["assistant_masks"], strict=True))

    def _with_parts(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return the message with image parts in the place of marks, and in parts if the template needs them."""
        content = content_parts(message["content"])
        if self.parts_only and isinstance(content, str):
            content = [{"type": "text", "text": content}]
        return message if content is message["content"] else {**message, "content": content}

    def _render_text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        return str(self._apply([messages], tools, tokenize=False)[0])

    def _formed(self, chat: Conversation) -> Conversation:
        """Return the conversation with tool arguments in the form that the template expects: text or an object."""
        messages = self.arguments.formed(chat.messages, lambda other: self._render_text(other, chat.tools))
        return chat if messages is chat.messages else replace(chat, messages=messages)


def template_difference(ours: Any, own: Any) -> RowError:
    """Return the error of a row whose first turn differs between the two templates."""
    for text in (own, ours):
        if isinstance(text, RowError):
            return text
    return RowError(
        "other_template",
        "the tokenizer's chat template and the training template render the first turn of this row differently",
        fix="data.multi_turn=per_turn, or data.chat_template=tokenizer",
    )
