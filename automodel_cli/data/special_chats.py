"""Conversations to tokens, with the special tokens in their strings treated as `data.special_tokens_in_text` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from automodel_cli.data.chat import ChatEncoder
from automodel_cli.data.encoded import Encoded, Unrolled
from automodel_cli.data.formats import Conversation
from automodel_cli.data.rows import RowError
from automodel_cli.data.special_text import KEEP_FIX, SpecialText


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
        if self.special.choice == "keep" or not any(counts):
            results: list[Any] = list(self.encoder.encode(chats))
        else:
            results = [self._encode_apart(chat) if n else None for chat, n in zip(chats, counts, strict=True)]
            places = [i for i, count in enumerate(counts) if not count]
            for place, result in zip(places, self.encoder.encode([chats[i] for i in places]), strict=True):
                results[place] = result
        return [_counted(result, count) for result, count in zip(results, counts, strict=True)]

    def prompt_ids(self, chat: Conversation) -> tuple[np.ndarray, int]:
        """Token ids up to where the model begins to speak, and the number of special tokens in the text."""
        count = self.special.count([chat.messages, chat.tools])
        if not count or self.special.choice == "keep":
            return self.encoder.prompt_ids(chat), count
        return self._apart.prompt_ids(self._hidden(chat)), count

    def _encode_apart(self, chat: Conversation) -> Any:
        try:
            return self._apart.encode([self._hidden(chat)])[0]
        except RowError as error:
            return error

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
