"""Encode conversations as tokens with a loss mask.

The mask is computed in one of three ways:

1. Generation blocks. If the template contains `{% generation %}`, the blocks determine the trained tokens.
2. Prefix difference. The conversation is rendered up to the start and up to the end of each trained turn. Both texts
   must be prefixes of the full text, as text and as token ids. This is verified for every row. The tokens between the
   two prefixes are trained.
3. One document per turn. If a template renders earlier turns differently once later turns follow (Qwen3 removes earlier
   reasoning), each trained turn becomes a separate document (`data/chat/multi_turn.py`).

Example of a prefix difference with the trained turn "Hi"::

    prefix before the turn  <user> Hello <end> <assistant>
    prefix up to its end    <user> Hello <end> <assistant> Hi <end>
    mask                       0     0     0        0       1   1

The token that ends a turn is trained (`data/chat/end_of_turn.py`). White space after it is not.

Rendered texts are encoded with `add_special_tokens=False`, because templates write BOS themselves.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from automodel_cli.data.chat.end_of_turn import TurnEnds, kind_of
from automodel_cli.data.chat.multi_turn import STAND_IN, TurnPieces, TurnTexts, continuation, turn_document
from automodel_cli.data.chat.prefix_tokenizer import PrefixEncoder
from automodel_cli.data.chat.renderer import ChatRenderer, check_alike
from automodel_cli.data.chat.template_coverage import RenderedCheck
from automodel_cli.data.chat.turn_spans import (
    assistant_turns,
    block_spans,
    located_turns,
    prefix_spans,
    selected_turns,
    trained_turns,
    turn_texts,
)
from automodel_cli.data.config import Mask, Turns
from automodel_cli.data.formats.examples import Conversation, Message, Messages
from automodel_cli.data.row_errors import RowError, attempt, attempt_batch, unwrap
from automodel_cli.data.tokenized import TOKENIZER_OPTIONS, Encoded, EncodedRow, Unrolled, as_ids, encode_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rendered = tuple[Conversation, str]
"""A conversation and its text."""
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
NOT_WHOLE = ("not_a_prefix", "no_stop", "generation_blocks", "dropped_by_template")
"""Codes of rows that cannot be encoded as one document, but possibly as one document per turn."""


class ChatEncoder(ChatRenderer):
    """Renderer and encoder of conversations with one template and one mask rule. Picklable, for worker processes."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str,
        mask: Mask,
        *,
        turns: Turns = "auto",
        stop_ids: Collection[int] = (),
        own_template: str | None = None,
        pictures: bool = False,
    ):
        """Create an encoder.

        Args:
            tokenizer: a tokenizer of transformers.
            template: the chat template of training.
            mask: `data.loss_mask`.
            turns: `data.multi_turn`.
            stop_ids: tokens other than EOS at which generation stops.
            own_template: the tokenizer's template, if `template` replaces it for training. Both must render the first
                turn of every row identically.
            pictures: rows can have pictures, whose templates may read content as a list of parts only.
        """
        super().__init__(tokenizer, template, pictures=pictures)
        self.mask, self.turns, self.own_template = mask, turns, own_template
        self.rendered, self.rendered_turn, self.prefixes = RenderedCheck(), RenderedCheck(), PrefixEncoder(tokenizer)
        self.uses_tags = mask != "all" and tokenizer.is_fast and bool(GENERATION_TAG.search(template))
        self.ends = TurnEnds.of(tokenizer, self._render_text, stop_ids)

    def encode(self, chats: Sequence[Conversation]) -> list[EncodedRow]:
        """Return tokens and mask of each conversation, or its error."""
        chats = [self._formed(chat) for chat in chats]
        if self.turns == "per_turn":
            return self._unroll(chats)
        results: list[EncodedRow] = [*self._encode_single(chats)]
        if self.turns == "auto" and self.mask != "all":
            places = [i for i, result in enumerate(results) if _is_unrollable(result)]
            for place, result in zip(places, self._unroll([chats[i] for i in places]), strict=True):
                results[place] = result
        return results

    def _encode_single(self, chats: Sequence[Conversation]) -> list[Encoded | RowError]:
        """Encode each conversation as one document."""
        texts = self._render([(chat, len(chat.messages), False) for chat in chats])
        checked = [attempt(self._check, chat, text) for chat, text in zip(chats, texts, strict=True)]
        if self.own_template is not None:
            checked = self._like_the_tokenizers(chats, checked)
        return attempt_batch(self._by_tags if self.uses_tags else self._by_prefixes, checked)

    def prompt_ids(self, chats: Sequence[Conversation]) -> list[np.ndarray | RowError]:
        """Return the token ids, int32, of each conversation with the generation prompt, or its error."""
        chats = [self._formed(chat) for chat in chats]
        texts = self._render([(chat, len(chat.messages), True) for chat in chats])
        whole = [attempt(self._whole_prompt, chat, text) for chat, text in zip(chats, texts, strict=True)]
        return attempt_batch(partial(encode_texts, self.tokenizer), whole)

    def _whole_prompt(self, chat: Conversation, rendered: str | RowError) -> str:
        text = unwrap(rendered)
        self.rendered.check(chat, text, (), self._render_text)
        return text

    def with_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> ChatEncoder:
        """Return a copy of this encoder with another tokenizer."""
        other = copy(self)
        other.tokenizer, other.prefixes = tokenizer, PrefixEncoder(tokenizer)
        return other

    def _like_the_tokenizers(
        self, chats: Sequence[Conversation], texts: Sequence[Rendered | RowError]
    ) -> list[Rendered | RowError]:
        """Replace texts whose first turn the tokenizer's template renders differently by an error."""

        def compared(text: Rendered | RowError, own: str | RowError, ours: str | RowError) -> Rendered:
            rendered = unwrap(text)
            check_alike(own, ours)
            return rendered

        first = [(chat, assistant_turns(chat)[0] + 1) if assistant_turns(chat) else (chat, 0) for chat in chats]
        prefixes = [(chat.messages[:count], chat.tools) for chat, count in first]
        expected = self._apply_many(prefixes, partial(self._texts, chat_template=self.own_template))
        rendered = self._apply_many(prefixes, self._texts)
        return [attempt(compared, *each) for each in zip(texts, expected, rendered, strict=True)]

    # -- checks of every row

    def _check(self, chat: Conversation, rendered: str | RowError) -> Rendered:
        """Return the text if it contains every part of the row (`data/chat/template_coverage.py`)."""
        text = unwrap(rendered)
        trained = assistant_turns(chat) if self.mask == "all" else selected_turns(chat, self.mask)
        if self.mask != "all" and not self.uses_tags:  # the prefixes show whether earlier turns keep reasoning
            trained = trained[-1:]
        self.rendered.check(chat, text, trained, self._render_text)
        return chat, text

    # -- generation tags

    def _by_tags(self, rows: Sequence[Rendered]) -> list[Encoded | RowError]:
        pairs = self._apply_many([(chat.messages, chat.tools) for chat, _ in rows], self._ids_and_mask)
        out = [attempt(self._select_runs, chat, pair) for (chat, _), pair in zip(rows, pairs, strict=True)]
        if self.turns == "auto":
            # if a template changes earlier turns, its blocks mark tokens that the model would not generate
            several = [i for i, (chat, _) in enumerate(rows) if len(assistant_turns(chat)) > 1]
            for i, edges in zip(several, self._edges_of([rows[i] for i in several]), strict=True):
                out[i] = attempt(_both, out[i], edges)
        return out

    def _ids_and_mask(self, conversations: list[Messages], tools: Messages | None) -> list[tuple[list[int], list[int]]]:
        options = {"return_assistant_tokens_mask": True, "return_dict": True, "tokenizer_kwargs": TOKENIZER_OPTIONS}
        out = self._apply(conversations, tools, **options)
        return list(zip(out["input_ids"], out["assistant_masks"], strict=True)) if out else []

    def _select_runs(self, chat: Conversation, pair: tuple[list[int], list[int]] | RowError) -> Encoded:
        """Return the mask of the template, restricted to the trained turns, each up to its stop token."""
        numbers, mask = unwrap(pair)
        ids, trained = as_ids(numbers), np.asarray(mask, np.uint8)
        kept = block_spans(trained, assistant_turns(chat), selected_turns(chat, self.mask))
        if kept is None:
            return Encoded(ids, trained)
        return trained_turns(self.tokenizer, self.ends, chat, ids, kept)

    # -- prefix difference

    def _by_prefixes(self, rows: Sequence[Rendered]) -> list[Encoded | RowError]:
        """Render and encode the prefixes of all located turns in one batch, then verify each row."""
        pieces = attempt_batch(self.prefixes.encode, self._edges_of(rows))
        return [attempt(self._between, chat, found) for (chat, _), found in zip(rows, pieces, strict=True)]

    def _edges_of(self, rows: Sequence[Rendered]) -> list[list[str] | RowError]:
        """Return `turn_texts` of the located turns of each conversation."""
        turns = [located_turns(chat, self.mask) for chat, _ in rows]
        jobs = []
        for (chat, _), located in zip(rows, turns, strict=True):
            for turn in located:
                jobs.append((chat, turn, True))
                if turn + 1 < len(chat.messages):
                    jobs.append((chat, turn + 1, False))
        rendered = iter(self._render(jobs))
        out = []
        for (chat, text), located in zip(rows, turns, strict=True):
            prefixes: list[str | RowError] = []
            for turn in located:
                prefixes += [next(rendered), next(rendered) if turn + 1 < len(chat.messages) else text]
            out.append(attempt(turn_texts, text, located, prefixes, self.tokenizer.eos_token))
        return out

    def _between(self, chat: Conversation, encoded: Sequence[np.ndarray] | RowError) -> Encoded:
        """Compute the mask.

        `encoded`: token ids of the full text, then for each located turn the ids of the prefix before the turn and of
        the prefix up to its end.
        """
        pieces = unwrap(encoded)
        ids, spans = pieces[0], prefix_spans(located_turns(chat, self.mask), pieces)
        if self.mask != "all":
            return trained_turns(self.tokenizer, self.ends, chat, ids, spans)
        last = chat.messages[-1]
        if last["role"] == "assistant" and chat.trained[-1]:
            kind = kind_of(last)
            if self.ends.end(ids, 0, len(ids), kind, tokenizer=self.tokenizer) is None:
                ids = np.append(ids, np.int32(self.ends.missing(kind)))
        trained = np.ones(len(ids), np.uint8)
        for _, (start, stop) in spans:
            trained[start:stop] = 0
        return Encoded(ids, trained)

    # -- one document per turn

    def _unroll(self, chats: Sequence[Conversation]) -> list[EncodedRow]:
        """Encode each conversation as one document per trained turn (`data/chat/multi_turn.py`)."""
        turns = [attempt(selected_turns, chat, self.mask) for chat in chats]
        trained = [() if isinstance(located, RowError) else located for located in turns]
        asked = [(chat, turn) for chat, located in zip(chats, trained, strict=True) for turn in located]
        prompts = self._render([(chat, turn, True) for chat, turn in asked])
        upto = self._render([(chat, turn + 1, False) for chat, turn in asked])
        texts = [
            attempt(self._generated_text, chat, turn, prompt, text)
            for (chat, turn), prompt, text in zip(asked, prompts, upto, strict=True)
        ]
        pieces = attempt_batch(self._encode_turns, texts)
        documents = iter(
            attempt(self._turn_document, chat.messages[turn], found)
            for (chat, turn), found in zip(asked, pieces, strict=True)
        )
        return [attempt(_unrolled, located, documents) for located in turns]

    def _generated_text(
        self, chat: Conversation, turn: int, rendered: str | RowError, upto: str | RowError
    ) -> tuple[str, str]:
        """Return the prompt and the text that the model generates in this turn, without trailing white space."""
        text = self._continuation(chat, turn, rendered, upto).rstrip()
        prompt = unwrap(rendered)
        seen = Conversation(chat.messages[: turn + 1], [*[False] * turn, True], chat.tools)
        self.rendered_turn.check(seen, prompt + text, [turn], self._document_text)
        return prompt, text

    def _encode_turns(self, texts: Sequence[tuple[str, str]]) -> list[TurnPieces]:
        flat = [text for prompt, turn in texts for text in (prompt, prompt + turn, turn)]
        ids = iter(encode_texts(self.tokenizer, flat))
        return list(zip(ids, ids, ids, strict=True))

    def _turn_document(self, message: Message, pieces: TurnPieces | RowError) -> Encoded:
        return turn_document(self.tokenizer, self.ends, unwrap(pieces), kind_of(message))

    def _document_text(self, messages: Messages, tools: Messages | None) -> str:
        """Return the text of the document whose trained turn is the last message."""
        chat, turn = Conversation(messages, [], tools), len(messages) - 1
        prompt, upto = self._render([(chat, turn, True), (chat, turn + 1, False)])
        return f"{prompt}{self._continuation(chat, turn, prompt, upto)}"

    def _continuation(
        self, chat: Conversation, turn: int, rendered_prompt: str | RowError, rendered: str | RowError
    ) -> str:
        prompt, upto = unwrap(rendered_prompt), unwrap(rendered)
        history = other = ""
        if not upto.startswith(prompt):
            stand_in = replace(chat, messages=[*chat.messages[:turn], STAND_IN])
            history, other = map(unwrap, self._render([(chat, turn, False), (stand_in, turn + 1, False)]))
        return continuation(TurnTexts(prompt, history, upto, other), chat.messages[turn])


def _both(result: Encoded | RowError, edges: list[str] | RowError) -> Encoded:
    encoded = unwrap(result)
    unwrap(edges)
    return encoded


def _unrolled(located: Sequence[int] | RowError, documents: Iterator[Encoded | RowError]) -> Encoded | Unrolled:
    """Take the documents of these turns from `documents`. Of several errors, the last one counts."""
    own = [next(documents) for _ in unwrap(located)]
    usable = [unwrap(document) for document in reversed(own)][::-1]
    return usable[0] if len(usable) == 1 else Unrolled(tuple(usable))


def _is_unrollable(result: object) -> bool:
    return isinstance(result, RowError) and result.code in NOT_WHOLE
