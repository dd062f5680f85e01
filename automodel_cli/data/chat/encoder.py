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

from automodel_cli.config.errors import DataError
from automodel_cli.data.chat.end_of_turn import TurnEnds, kind_of
from automodel_cli.data.chat.multi_turn import STAND_IN, TurnTexts, continuation, reasoning_key, turn_document, with_key
from automodel_cli.data.chat.prefix_tokenizer import PrefixEncoder
from automodel_cli.data.chat.template_coverage import RenderedCheck
from automodel_cli.data.chat.time_limit import time_limit
from automodel_cli.data.config import Mask, Turns
from automodel_cli.data.formats.examples import Conversation
from automodel_cli.data.formats.tool_calls import ArgumentForm
from automodel_cli.data.pictures.rows import content_parts
from automodel_cli.data.row_errors import RowError, attempt
from automodel_cli.data.tokenized import TOKENIZER_OPTIONS, Encoded, Unrolled, as_ids, encode_texts

RENDER_SECONDS = 60.0
"""Time limit of one call of the renderer. One second is added per conversation."""
RENDER_FIX = "data.chat_template=chatml, or a template whose loops end"
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
UNROLL_FIX = "data.multi_turn=per_turn, or data.multi_turn=auto"
NOT_WHOLE = ("not_a_prefix", "no_stop", "generation_blocks", "dropped_by_template")
"""Codes of rows that cannot be encoded as one document, but possibly as one document per turn."""


class ChatEncoder:
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
        self.tokenizer, self.template, self.mask, self.turns = tokenizer, template, mask, turns
        self.own_template = own_template
        self.rendered, self.rendered_turn, self.arguments = RenderedCheck(), RenderedCheck(), ArgumentForm()
        self.prefixes = PrefixEncoder(tokenizer)
        self.uses_tags = mask != "all" and tokenizer.is_fast and bool(GENERATION_TAG.search(template))
        self.reasoning_key = reasoning_key(template)
        self.parts_only = pictures and self._ignores_text()
        self.ends = TurnEnds.of(tokenizer, self._render_text, stop_ids)

    def _ignores_text(self) -> bool:
        """Return whether the template renders content in parts and omits content that is a string."""
        word, self.parts_only = "qzxwordxzq", False
        return word not in str(attempt(self._render_text, [{"role": "user", "content": word}], None))

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
        if isinstance(text, RowError):
            raise text
        self.rendered.check(chat, text, (), self._render_text)
        return text

    def with_tokenizer(self, tokenizer: Any) -> ChatEncoder:
        """Return a copy of this encoder with another tokenizer."""
        other = copy(self)
        other.tokenizer, other.prefixes = tokenizer, PrefixEncoder(tokenizer)
        return other

    def _like_the_tokenizers(self, chats: Sequence[Conversation], texts: Sequence[Any]) -> list[Any]:
        """Replace texts whose first turn the tokenizer's template renders differently by an error."""
        first = [(chat, _assistant_turns(chat)[0] + 1) if _assistant_turns(chat) else (chat, 0) for chat in chats]
        prefixes = [(chat.messages[:count], chat.tools) for chat, count in first]
        expected = self._apply_many(prefixes, chat_template=self.own_template, tokenize=False)
        rendered = self._apply_many(prefixes, tokenize=False)
        return [
            text if isinstance(text, RowError) or own == our else _unlike(our, own)
            for text, own, our in zip(texts, expected, rendered, strict=True)
        ]

    # -- rendering

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

    # -- checks of every row, and selection of the trained turns

    def _check(self, chat: Conversation, text: str | RowError) -> str:
        """Return the text if it contains every part of the row (`data/chat/template_coverage.py`)."""
        if isinstance(text, RowError):
            raise text
        trained = _assistant_turns(chat) if self.mask == "all" else self._turns(chat)
        if self.mask != "all" and not self.uses_tags:  # the prefixes show whether earlier turns keep reasoning
            trained = trained[-1:]
        self.rendered.check(chat, text, trained, self._render_text)
        return text

    def _turns(self, chat: Conversation) -> list[int]:
        """Return the indices of the assistant messages that the mask rule trains. Raises RowError if there is none."""
        spoken = _assistant_turns(chat)
        if not spoken:
            raise RowError("no_label_token", "the conversation has no assistant message to train on")
        chosen = [i for i in (spoken[-1:] if self.mask == "last_turn" else spoken) if chat.trained[i]]
        if not chosen:
            raise RowError("no_label_token", "every assistant message that data.loss_mask selects has train: false")
        return chosen

    def _located(self, chat: Conversation) -> list[int]:
        """Return the turns whose tokens must be located: trained turns, or untrained turns if the mask is `all`."""
        if self.mask == "all":
            return [i for i in _assistant_turns(chat) if not chat.trained[i]]
        return self._turns(chat)

    # -- generation tags

    def _by_tags(self, chats: Sequence[Conversation], texts: Sequence[str]) -> list[Encoded | RowError]:
        conversations = [(chat.messages, chat.tools) for chat in chats]
        options = {"return_assistant_tokens_mask": True, "return_dict": True, "tokenizer_kwargs": TOKENIZER_OPTIONS}
        pairs = self._apply_many(conversations, **options)
        out = [attempt(self._select_runs, chat, pair) for chat, pair in zip(chats, pairs, strict=True)]
        if self.turns == "auto":
            # if a template changes earlier turns, its blocks mark tokens that the model would not generate
            several = [i for i, chat in enumerate(chats) if len(_assistant_turns(chat)) > 1]
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
        turns, spoken = self._turns(chat), _assistant_turns(chat)
        spans = _runs(trained)
        if len(spans) != len(spoken):
            if turns != spoken:
                raise RowError(
                    "generation_blocks",
                    f"the template renders {len(spans)} generation blocks for {len(spoken)} assistant messages, so "
                    "single turns cannot be selected",
                    fix="data.loss_mask=assistant without train: false, or a template with one generation block per "
                    "turn",
                )
            return Encoded(ids, trained)
        kept = [(turn, span) for turn, span in zip(spoken, spans, strict=True) if turn in turns]
        return self._trained(chat, ids, kept)

    # -- prefix difference

    def _by_prefixes(self, chats: Sequence[Conversation], texts: Sequence[str]) -> list[Encoded | RowError]:
        """Render and encode the prefixes of all located turns in one batch, then verify each row."""
        out: list[Any] = self._edges_of(chats, texts)
        good = [i for i, row in enumerate(out) if not isinstance(row, RowError)]
        for i, pieces in zip(good, self.prefixes.encode([out[i] for i in good]), strict=True):
            out[i] = attempt(self._between, chats[i], pieces)
        return out

    def _edges_of(self, chats: Sequence[Conversation], texts: Sequence[str]) -> list[list[str] | RowError]:
        """Return `_edges` of the located turns of each conversation."""
        turns = [self._located(chat) for chat in chats]
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
            out.append(attempt(_edges, text, located, prefixes, self.tokenizer.eos_token))
        return out

    def _between(self, chat: Conversation, pieces: Sequence[np.ndarray]) -> Encoded:
        """Compute the mask.

        `pieces`: token ids of the full text, then for each located turn the ids of the prefix before the turn and of
        the prefix up to its end.
        """
        ids, prefixes = pieces[0], pieces[1:]
        located = self._located(chat)
        spans = []
        for turn, before, upto in zip(located, prefixes[::2], prefixes[1::2], strict=True):
            for prefix, side in ((before, "start"), (upto, "end")):
                if not np.array_equal(ids[: len(prefix)], prefix):
                    raise RowError(
                        "not_a_prefix",
                        f"a token crosses the {side} of message {turn}, so the trained tokens differ from the tokens "
                        "that follow its prompt",
                        fix=UNROLL_FIX,
                    )
            spans.append((turn, (len(before), len(upto))))
        if self.mask != "all":
            return self._trained(chat, ids, spans)
        last = chat.messages[-1]
        if last["role"] == "assistant" and chat.trained[-1]:
            kind = kind_of(last)
            if self.ends.end(ids, 0, len(ids), kind, tokenizer=self.tokenizer) is None:
                ids = np.append(ids, np.int32(self.ends.missing(kind)))
        trained = np.ones(len(ids), np.uint8)
        for _, (start, stop) in spans:
            trained[start:stop] = 0
        return Encoded(ids, trained)

    def _trained(self, chat: Conversation, ids: np.ndarray, spans: Sequence[tuple[int, tuple[int, int]]]) -> Encoded:
        """Return the document in which the given turns are trained, each including its stop token.

        If the template writes no stop token after the last turn, it is appended. If other text follows the turn,
        RowError is raised, because the token would have to be inserted before this text.
        """
        ends = []
        for turn, (start, stop) in spans:
            kind = kind_of(chat.messages[turn])
            end = self.ends.end(ids, start, stop, kind, tokenizer=self.tokenizer)
            if end is None:
                token = self.ends.missing(kind)
                if self.tokenizer.decode(ids[stop:]).strip():
                    raise RowError(
                        "no_stop",
                        f"the chat template writes no token that ends message {turn}, so the model would not learn to "
                        "stop there",
                        fix=UNROLL_FIX,
                    )
                ids = np.append(ids[:stop], np.int32(token))
                end = stop + 1
            ends.append((start, end))
        trained = np.zeros(len(ids), np.uint8)
        for start, end in ends:
            trained[start:end] = 1
        return Encoded(ids, trained)

    # -- one document per turn

    def _unroll(self, chats: Sequence[Conversation]) -> list[Encoded | Unrolled | RowError]:
        """Encode each conversation as one document per trained turn (`data/chat/multi_turn.py`)."""
        turns: list[Any] = [attempt(self._turns, chat) for chat in chats]
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


def _unlike(ours: Any, own: Any) -> RowError:
    """Return the error of a row whose first turn differs between the two templates."""
    for text in (own, ours):
        if isinstance(text, RowError):
            return text
    return RowError(
        "other_template",
        "the tokenizer's chat template and the training template render the first turn of this row differently",
        fix="data.multi_turn=per_turn, or data.chat_template=tokenizer",
    )


def _assistant_turns(chat: Conversation) -> list[int]:
    return [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]


def _edges(whole: str, located: Sequence[int], prefixes: Sequence[str | RowError], eos_token: str | None) -> list[str]:
    """Return the full text, then for each turn the text before it and up to its end, without trailing white space.

    An EOS token that a template writes only after the last message (Phi-3) is not part of a turn.

    Args:
        whole: text of the complete conversation.
        located: indices of the turns.
        prefixes: two rendered prefixes per turn: with the generation prompt before it, and up to its end.
        eos_token: the EOS token of the tokenizer.

    Raises:
        RowError: a prefix is not a prefix of `whole`.
    """
    texts = [whole]
    for turn, before, upto in zip(located, prefixes[::2], prefixes[1::2], strict=True):
        if isinstance(upto, str) and eos_token and not whole.startswith(upto):
            upto = upto.rstrip().removesuffix(eos_token)
        for text in (before, upto):
            if isinstance(text, RowError):
                raise text
            if not whole.startswith(text):
                raise RowError(
                    "not_a_prefix",
                    f"the chat template renders the text up to message {turn} differently once later messages follow, "
                    "so one document cannot contain every turn as the model will see it",
                    fix=UNROLL_FIX,
                )
        assert isinstance(before, str) and isinstance(upto, str), "errors are raised above"
        texts += [before, max(upto.rstrip(), before, key=len)]
    return texts


def _runs(flags: np.ndarray) -> list[tuple[int, int]]:
    """Return start and stop of each run of ones: [0, 1, 1, 0, 1] gives [(1, 3), (4, 5)]."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags, [0])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
