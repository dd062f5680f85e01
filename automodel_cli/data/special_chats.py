"""Conversations to tokens, with the special tokens in their strings treated as `data.special_tokens_in_text` says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from automodel_cli.data.chat import ChatEncoder
from automodel_cli.data.documents import Conversation
from automodel_cli.data.encoded import Encoded, Unrolled
from automodel_cli.data.rows import RowError, attempt
from automodel_cli.data.special_text import KEEP_FIX, SpecialText

Encode = Callable[[ChatEncoder, Sequence[Conversation]], Sequence[Any]]


class SpecialChats:
    """Encodes by `encoder`; conversations that hold special tokens as text by one that tells the two apart."""

    def __init__(self, encoder: ChatEncoder, special: SpecialText):
        self.encoder, self.special = encoder, special

    @cached_property
    def _apart(self) -> ChatEncoder:
        return self.encoder.with_tokenizer(self.special.spelled)

    def encode(self, chats: Sequence[Conversation]) -> list[Any]:
        """Tokens and mask of each conversation with the number of special tokens in its text, or why it has none."""
        counts = [self.special.count([chat.messages, chat.tools]) for chat in chats]
        results = self._dispatched(ChatEncoder.encode, chats, counts)
        return [_counted(result, count) for result, count in zip(results, counts, strict=True)]

    def prompt_ids(self, chats: Sequence[Conversation]) -> list[tuple[np.ndarray | RowError, int]]:
        """Token ids of each conversation up to where the model begins to speak, or why it has none, and the number of
        special tokens in its text.
        """
        counts = [self.special.count([chat.messages, chat.tools]) for chat in chats]
        return list(zip(self._dispatched(ChatEncoder.prompt_ids, chats, counts), counts, strict=True))

    def _dispatched(self, encode: Encode, chats: Sequence[Conversation], counts: Sequence[int]) -> list[Any]:
        """What the encoder that fits says of each: all conversations without special tokens in one call."""
        plain = [not count or self.special.choice == "keep" for count in counts]
        together = iter(encode(self.encoder, [chat for chat, is_plain in zip(chats, plain, strict=True) if is_plain]))
        return [
            next(together) if is_plain else attempt(self._one_apart, encode, chat)
            for chat, is_plain in zip(chats, plain, strict=True)
        ]

    def _one_apart(self, encode: Encode, chat: Conversation) -> Any:
        return encode(self._apart, [self._hidden(chat)])[0]

    def _hidden(self, chat: Conversation) -> Conversation:
        """The conversation with its special tokens hidden, if the template renders it as it renders the row itself.

        Raises RowError where the template reads special tokens in the text: it would be shown other text.
        """
        special = self.special
        special.check([chat.messages, chat.tools])
        hidden = replace(chat, messages=special.hide(chat.messages), tools=special.hide(chat.tools))
        texts = [self.encoder.render(each) for each in (chat, hidden)]
        if special.restore(texts[1]) != texts[0]:
            raise RowError(
                "special_token",
                "the chat template treats a special token of the text in a way of its own, so it cannot become text",
                fix=KEEP_FIX,
            )
        return hidden


def _counted(result: Any, count: int) -> Any:
    if count and isinstance(result, Encoded):
        return replace(result, num_special=count)
    if count and isinstance(result, Unrolled):
        first, *others = result.documents
        return Unrolled((replace(first, num_special=count), *others))
    return result
