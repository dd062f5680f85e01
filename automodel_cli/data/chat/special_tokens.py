"""Encode special tokens in the strings of a row as plain text instead of control tokens.

`<|im_end|>` in a question must not end the turn, but the `<|im_end|>` of the template must. Three steps distinguish the
two exactly, for every template:

1. In the strings of the row, the first character of each special token is replaced by a private-use character. The row
   is rendered.
2. In the rendered text the spellings are swapped. A remaining special token comes from the template and gets the
   private character. The tokens of the row get their first character back. The length of the text does not change.
3. A copy of the tokenizer, whose special tokens begin with the private character, encodes the text. To this tokenizer
   the plain spelling is ordinary text. Its ids are mapped back.

Added tokens that are not special (`<think>`, `<tool_call>` of Qwen3) are not changed, because authors write them as
text on purpose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from automodel_cli.data.chat.encoder import ChatEncoder
from automodel_cli.data.config import SpecialTokensInText
from automodel_cli.data.formats.examples import Conversation
from automodel_cli.data.json_strings import map_strings, strings_in
from automodel_cli.data.row_errors import RowError, attempt
from automodel_cli.data.tokenized import Encoded, EncodedRow, Unrolled, around, encode_texts

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

T = TypeVar("T")
PRIVATE = 0x10F700
"""First private-use character. It lies at the end of the last private-use plane, which no known text uses."""
_KEEP_FIX = "data.special_tokens_policy=keep, which encodes them as control tokens"


class SpecialText:
    """Special tokens of one tokenizer in texts. Can be pickled until the first text is encoded."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, choice: SpecialTokensInText = "as_text"):
        """`choice`: treatment of special tokens in rows. The caller resolves `auto`."""
        self.tokenizer, self.choice = tokenizer, choice
        added = tokenizer.added_tokens_decoder.values()
        contents = {*(token.content for token in added if token.special), *tokenizer.all_special_tokens}
        # longest first, as in the tokenizer
        self.tokens = sorted(filter(None, contents), key=len, reverse=True)
        firsts = dict.fromkeys(token[0] for token in self.tokens)
        self.private = {first: chr(PRIVATE + i) for i, first in enumerate(firsts)}
        self._plain = {private: first for first, private in self.private.items()}
        self._found = _any_of(self.tokens)
        self._hidden = _any_of([self.hide(token) for token in self.tokens])
        self._private_characters = re.compile("[" + "".join(self._plain) + "]") if self._plain else _NOTHING

    def count(self, value: object) -> int:
        """Count special tokens in all strings of nested lists and dicts, including keys."""
        return sum(len(self._found.findall(text)) for text in strings_in(value))

    def hide(self, text: str) -> str:
        """Return the text with a private first character of each special token."""
        return self._found.sub(lambda match: self.private[match[0][0]] + match[0][1:], text)

    def restore(self, text: str) -> str:
        """Return the text before `hide`."""
        return self._private_characters.sub(lambda match: self._plain[match[0]], text)

    def swap(self, text: str) -> str:
        """Hide the special tokens of a text and restore hidden ones. The length does not change."""
        return self.hide(text) if not self._private_characters.search(text) else self._swap(text)

    def _swap(self, text: str) -> str:
        parts, last = [], 0
        for match in self._hidden.finditer(text):
            parts += [self.hide(text[last : match.start()]), self.restore(match[0])]
            last = match.end()
        return "".join([*parts, self.hide(text[last:])])

    def check(self, value: object) -> None:
        """Raise RowError if special tokens are not allowed or cannot be encoded as text."""
        names = list(dict.fromkeys(token for text in strings_in(value) for token in self._found.findall(text)))
        if self.choice == "refuse":
            raise RowError(
                "special_token",
                f"the text contains the special token {names[0]!r}, and data.special_tokens_policy={self.choice}",
                fix=f"data.special_tokens_policy=as_text, or {_KEEP_FIX}",
            )
        problem = self._problem(names, json.dumps(value, ensure_ascii=False, default=str))
        if problem:
            raise RowError(
                "special_token",
                f"the text contains {names[0]!r}, which cannot be encoded as text: {problem}",
                fix=_KEEP_FIX,
            )

    def _problem(self, found: Sequence[str], text: str) -> str:
        if not self.tokenizer.is_fast:
            return "only a fast tokenizer can distinguish special tokens from text"
        if self._private_characters.search(text):
            return "the row contains private-use characters that serve as placeholders"
        for token in found:
            own = self.tokenizer.convert_tokens_to_ids(token)
            if any(own in self.spelled.ids(text) for text in (token, f"a{token}a", f" {token} ")):
                return f"the tokenizer encodes the characters of {token!r} as the special token"
        return ""

    @cached_property
    def spelled(self) -> SpelledTokenizer:
        """Tokenizer for texts with hidden special tokens."""
        return SpelledTokenizer(self)

    def encode_texts(self, texts: Sequence[str], add_special_tokens: bool) -> list[tuple[np.ndarray | RowError, int]]:
        """Return the token ids of texts without a template, each with its number of special tokens."""
        results: list[np.ndarray | RowError] = [
            *encode_texts(self.tokenizer, texts, add_special_tokens=add_special_tokens)
        ]
        counts = [self.count(text) for text in texts]
        if self.choice != "keep":
            for place in np.flatnonzero(counts).tolist():
                results[place] = attempt(self._encode_text, texts[place], add_special_tokens)
        return list(zip(results, counts, strict=True))

    def _encode_text(self, text: str, add_special_tokens: bool) -> np.ndarray:
        """Return the token ids, int32, of a text without a template. Tokens that the tokenizer adds around it stay
        special. Raises RowError like `check`.
        """
        self.check(text)
        ids = np.asarray(self.spelled.ids(text), np.int32)
        if not add_special_tokens:
            return ids
        before, after = around(self.tokenizer)
        return np.concatenate([before, ids, after]).astype(np.int32)


class SpelledTokenizer:
    """A fast tokenizer for rendered conversations whose own special tokens are hidden (`SpecialText.hide`).

    Replaces the tokenizer for rendering and encoding conversations. All other attributes are the tokenizer's.
    """

    is_fast = True

    def __init__(self, special: SpecialText):
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast

        self._special, self._tokenizer = special, special.tokenizer
        described = json.loads(self._tokenizer.backend_tokenizer.to_str())
        spelling = {token: special.hide(token) for token in special.tokens}
        names = {}
        for token in described["added_tokens"]:
            spelled = spelling.get(token["content"], token["content"])
            names[spelled] = token["id"]
            token.update(content=spelled, normalized=token["normalized"] and spelled == token["content"])
        described.update(post_processor=None, truncation=None, padding=None)
        backend = Tokenizer.from_str(json.dumps(described))
        self._inner = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
        self._original = {backend.token_to_id(name): number for name, number in names.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str | list[str], **options: Any) -> BatchEncoding:
        """Like the tokenizer's call on one text or several, without special tokens around them."""
        out: BatchEncoding = self._inner(map_strings(self._special.swap, text), **options)
        ids = out["input_ids"]
        out["input_ids"] = self._back(ids) if isinstance(text, str) else [self._back(row) for row in ids]
        return out

    def ids(self, text: str) -> list[int]:
        """Encode a text of a row. None of its tokens is special."""
        return self._back(self._inner(text, add_special_tokens=False)["input_ids"])

    def _back(self, ids: Sequence[int]) -> list[int]:
        return [self._original.get(number, number) for number in ids]

    def apply_chat_template(self, *args: Any, **options: Any) -> Any:
        """Apply the tokenizer's method, which calls this object to encode the rendered text."""
        return type(self._tokenizer).apply_chat_template(cast("PreTrainedTokenizerBase", self), *args, **options)


class SpecialChats:
    """Encoder of conversations that handles special tokens in their text. Other conversations use `encoder`."""

    def __init__(self, encoder: ChatEncoder, special: SpecialText):
        self.encoder, self.special = encoder, special

    @cached_property
    def _spelled_encoder(self) -> ChatEncoder:
        return self.encoder.with_tokenizer(cast("PreTrainedTokenizerBase", self.special.spelled))

    def encode(self, chats: Sequence[Conversation]) -> list[EncodedRow]:
        """Return tokens and mask of each conversation with its number of special tokens, or its error."""
        counts = [self.special.count([chat.messages, chat.tools]) for chat in chats]
        results = self._dispatched(ChatEncoder.encode, chats, counts)
        return [_counted(result, count) for result, count in zip(results, counts, strict=True)]

    def prompt_ids(self, chats: Sequence[Conversation]) -> list[tuple[np.ndarray | RowError, int]]:
        """Return the prompt ids of each conversation, up to the start of the response, or its error. Also return the
        number of special tokens in its text.
        """
        counts = [self.special.count([chat.messages, chat.tools]) for chat in chats]
        return list(zip(self._dispatched(ChatEncoder.prompt_ids, chats, counts), counts, strict=True))

    def _dispatched(
        self,
        encode: Callable[[ChatEncoder, Sequence[Conversation]], Sequence[T]],
        chats: Sequence[Conversation],
        counts: Sequence[int],
    ) -> list[T | RowError]:
        """Return the results of the matching encoders. All conversations without special tokens are encoded in one
        call."""
        plain = [not count or self.special.choice == "keep" for count in counts]
        together = iter(encode(self.encoder, [chat for chat, is_plain in zip(chats, plain, strict=True) if is_plain]))

        def hidden(chat: Conversation) -> T:
            return encode(self._spelled_encoder, [self._hidden(chat)])[0]

        return [
            next(together) if is_plain else attempt(hidden, chat) for chat, is_plain in zip(chats, plain, strict=True)
        ]

    def _hidden(self, chat: Conversation) -> Conversation:
        """Return the conversation with hidden special tokens, if the template renders it as it renders the original.

        Raises RowError if the template reacts to special tokens in the text, because it would render a different text.
        """
        special = self.special
        special.check([chat.messages, chat.tools])
        messages, tools = map_strings(special.hide, [chat.messages, chat.tools])
        hidden = replace(chat, messages=messages, tools=tools)
        texts = [self.encoder.render(each) for each in (chat, hidden)]
        if special.restore(texts[1]) != texts[0]:
            raise RowError(
                "special_token",
                "the chat template changes a special token of the text, so it cannot be encoded as text",
                fix=_KEEP_FIX,
            )
        return hidden


def _counted(result: EncodedRow, count: int) -> EncodedRow:
    match result:
        case Encoded():
            return replace(result, num_special=count)
        case Unrolled((first, *others)):
            return Unrolled((replace(first, num_special=count), *others))
    return result


_NOTHING = re.compile(r"(?!)")


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts))) if texts else _NOTHING
