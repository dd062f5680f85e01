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
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from automodel_cli.data.chat.end_of_turn import TurnEnds, kind_of
from automodel_cli.data.chat.multi_turn import STAND_IN, TurnTexts, continuation, turn_document
from automodel_cli.data.chat.prefix_tokenizer import PrefixEncoder
from automodel_cli.data.chat.renderer import ChatRenderer, template_difference
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
from automodel_cli.data.formats.examples import Conversation
from automodel_cli.data.row_errors import RowError, attempt
from automodel_cli.data.tokenized import TOKENIZER_OPTIONS, Encoded, Unrolled, as_ids, encode_texts

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
NOT_WHOLE = ("not_a_prefix", "no_stop", "generation_blocks", "dropped_by_template")
"""Codes of rows that cannot be encoded as one document, but possibly as one document per turn."""


class ChatEncoder(ChatRenderer):
    """Renderer and encoder of conversations with one template and one mask rule. Picklable, for worker processes."""

    def __init__(
        self,
        tokenizer: Any,
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

    def encode(self, chats: Sequence[Conversation]) -> list[Encoded | Unrolled | RowError]:
        """Return tokens and mask of each conversation, or its error."""
        chats = [self._formed(chat) for chat in chats]
        if self.turns == "per_turn":
            return self._unroll(chats)
        results: list[Any] = self._encode_single(chats)
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
        good = [i for i, result in enumerate(checked) if not isinstance(result, RowError)]
        encode = self._by_tags if self.uses_tags else self._by_prefixes
        results = encode([chats[i] for i in good], [checked[i] for i in good])
        for i, result in zip(good, results, strict=True):
            checked[i] = result
        return checked

    def prompt_ids(self, chats: Sequence[Conversation]) -> list[np.ndarray | RowError]:
        """Return the token ids, int32, of each conversation with the generation prompt, or its error."""
        chats = [self._formed(chat) for chat in chats]
        texts = self._render([(chat, len(chat.messages), True) for chat in chats])
        out: list[Any] = [attempt(self._whole_prompt, chat, text) for chat, text in zip(chats, texts, strict=True)]
        good = [i for i, text in enumerate(out) if not isinstance(text, RowError)]
        for i, ids in zip(good, encode_texts(self.tokenizer, [out[i] for i in good]), strict=True):
            out[i] = ids
        return out

    def _whole_prompt(self, chat: Conversation, text: str | RowError) -> str:
        text = _text(text)
        self.rendered.check(chat, text, (), self._render_text)
        return text

    def with_tokenizer(self, tokenizer: Any) -> ChatEncoder:
        """Return a copy of this encoder with another tokenizer."""
        other = copy(self)
        other.tokenizer, other.prefixes = tokenizer, PrefixEncoder(tokenizer)
        return other

    def _like_the_tokenizers(self, chats: Sequence[Conversation], texts: Sequence[Any]) -> list[Any]:
        """Replace texts whose first turn the tokenizer's template renders differently by an error."""
        first = [(chat, assistant_turns(chat)[0] + 1) if assistant_turns(chat) else (chat, 0) for chat in chats]
        prefixes = [(chat.messages[:count], chat.tools) for chat, count in first]
        expected = self._apply_many(prefixes, chat_template=self.own_template, tokenize=False)
        rendered = self._apply_many(prefixes, tokenize=False)
        return [
            text if isinstance(text, RowError) or own == our else template_difference(our, own)
            for text, own, our in zip(texts, expected, rendered, strict=True)
        ]

    # -- checks of every row

    def _check(self, chat: Conversation, text: str | RowError) -> str:
        """Return the text if it contains every part of the row (`data/chat/template_coverage.py`)."""
        text = _text(text)
        trained = assistant_turns(chat) if self.mask == "all" else selected_turns(chat, self.mask)
        if self.mask != "all" and not self.uses_tags:  # the prefixes show whether earlier turns keep reasoning
            trained = trained[-1:]
        self.rendered.check(chat, text, trained, self._render_text)
        return text

    # -- generation tags

    def _by_tags(self, chats: Sequence[Conversation], texts: Sequence[str]) -> list[Encoded | RowError]:
        conversations = [(chat.messages, chat.tools) for chat in chats]
        options = {"return_assistant_tokens_mask": True, "return_dict": True, "tokenizer_kwargs": TOKENIZER_OPTIONS}
        pairs = self._apply_many(conversations, **options)
        out = [attempt(self._select_runs, chat, pair) for chat, pair in zip(chats, pairs, strict=True)]
        if self.turns == "auto":
            # if a template changes earlier turns, its blocks mark tokens that the model would not generate
            several = [i for i, chat in enumerate(chats) if len(assistant_turns(chat)) > 1]
            located_edges = self._edges_of([chats[i] for i in several], [texts[i] for i in several])
            for i, edges in zip(several, located_edges, strict=True):
                if isinstance(edges, RowError) and not isinstance(out[i], RowError):
                    out[i] = edges
        return out

    def _select_runs(self, chat: Conversation, pair: tuple[list[int], list[int]] | RowError) -> Encoded:
        """Return the mask of the template, restricted to the trained turns, each up to its stop token."""
        if isinstance(pair, RowError):
            raise pair
        ids, trained = as_ids(pair[0]), np.asarray(pair[1], np.uint8)
        kept = block_spans(trained, assistant_turns(chat), selected_turns(chat, self.mask))
        if kept is None:
            return Encoded(ids, trained)
        return trained_turns(self.tokenizer, self.ends, chat, ids, kept)

    # -- prefix difference

    def _by_prefixes(self, chats: Sequence[Conversation], texts: Sequence[str]) -> list[Encoded | RowError]:
        """Render and encode the prefixes of all located turns in one batch, then verify each row."""
        out: list[Any] = self._edges_of(chats, texts)
        good = [i for i, row in enumerate(out) if not isinstance(row, RowError)]
        for i, pieces in zip(good, self.prefixes.encode([out[i] for i in good]), strict=True):
            out[i] = attempt(self._between, chats[i], pieces)
        return out

    def _edges_of(self, chats: Sequence[Conversation], texts: Sequence[str]) -> list[list[str] | RowError]:
        """Return `turn_texts` of the located turns of each conversation."""
        turns = [located_turns(chat, self.mask) for chat in chats]
        jobs = []
        for chat, located in zip(chats, turns, strict=True):
            for turn in located:
                jobs.append((chat, turn, True))
                if turn + 1 < len(chat.messages):
                    jobs.append((chat, turn + 1, False))
        rendered = iter(self._render(jobs))
        out: list[Any] = []
        for chat, text, located in zip(chats, texts, turns, strict=True):
            prefixes: list[str | RowError] = []
            for turn in located:
                prefixes += [next(rendered), next(rendered) if turn + 1 < len(chat.messages) else text]
            out.append(attempt(turn_texts, text, located, prefixes, self.tokenizer.eos_token))
        return out

    def _between(self, chat: Conversation, pieces: Sequence[np.ndarray]) -> Encoded:
        """Compute the mask.

        `pieces`: token ids of the full text, then for each located turn the ids of the prefix before the turn and of
        the prefix up to its end.
        """
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

    def _unroll(self, chats: Sequence[Conversation]) -> list[Encoded | Unrolled | RowError]:
        """Encode each conversation as one document per trained turn (`data/chat/multi_turn.py`)."""
        turns: list[Any] = [attempt(selected_turns, chat, self.mask) for chat in chats]
        pairs = [(i, turn) for i, located in enumerate(turns) if not isinstance(located, RowError) for turn in located]
        prompts = self._render([(chats[i], turn, True) for i, turn in pairs])
        continuations = self._generated_texts([(chats[i], turn) for i, turn in pairs], prompts)
        texts: list[str] = []
        for prompt, text in zip(prompts, continuations, strict=True):
            if not isinstance(text, RowError):
                assert isinstance(prompt, str), "a failed prompt fails its turn"
                texts += [prompt, prompt + text, text]
        ids = iter(encode_texts(self.tokenizer, texts))
        documents: list[list[Encoded]] = [[] for _ in chats]
        for (i, turn), text in zip(pairs, continuations, strict=True):
            if isinstance(text, RowError):
                turns[i] = text
                continue
            pieces = (next(ids), next(ids), next(ids))
            document = attempt(turn_document, self.tokenizer, self.ends, pieces, kind_of(chats[i].messages[turn]))
            if isinstance(document, RowError):
                turns[i] = document
            else:
                documents[i].append(document)
        return [
            result if isinstance(result, RowError) else unrolled[0] if len(unrolled) == 1 else Unrolled(tuple(unrolled))
            for result, unrolled in zip(turns, documents, strict=True)
        ]

    def _generated_texts(
        self, asked: Sequence[tuple[Conversation, int]], prompts: Sequence[str | RowError]
    ) -> list[str | RowError]:
        """Return the text that the model generates in each turn, without trailing white space."""
        upto = self._render([(chat, turn + 1, False) for chat, turn in asked])
        out: list[Any] = []
        for (chat, turn), prompt, text in zip(asked, prompts, upto, strict=True):
            out.append(attempt(self._generated_text, chat, turn, prompt, text))
        return out

    def _generated_text(self, chat: Conversation, turn: int, prompt: str | RowError, upto: str | RowError) -> str:
        text = self._continuation(chat, turn, prompt, upto).rstrip()
        seen = Conversation(chat.messages[: turn + 1], [*[False] * turn, True], chat.tools)
        self.rendered_turn.check(seen, f"{prompt}{text}", [turn], self._document_text)
        return text

    def _document_text(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        """Return the text of the document whose trained turn is the last message."""
        chat, turn = Conversation(messages, [], tools), len(messages) - 1
        prompt, upto = self._render([(chat, turn, True), (chat, turn + 1, False)])
        return f"{prompt}{self._continuation(chat, turn, prompt, upto)}"

    def _continuation(self, chat: Conversation, turn: int, prompt: str | RowError, upto: str | RowError) -> str:
        prompt, upto = _text(prompt), _text(upto)
        history = other = ""
        if not upto.startswith(prompt):
            stand_in = replace(chat, messages=[*chat.messages[:turn], STAND_IN])
            history, other = map(_text, self._render([(chat, turn, False), (stand_in, turn + 1, False)]))
        return continuation(TurnTexts(prompt, history, upto, other), chat.messages[turn])


def _text(rendered: str | RowError) -> str:
    if isinstance(rendered, RowError):
        raise rendered
    return rendered


def _is_unrollable(result: Any) -> bool:
    return isinstance(result, RowError) and result.code in NOT_WHOLE
