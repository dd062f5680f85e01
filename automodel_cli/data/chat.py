"""Conversations as tokens, and which of them are trained.

Two ways, in this order. A template that marks what the model says with `{% generation %}` decides itself. For any other
the conversation is rendered up to each trained turn and up to its end; both must be prefixes of the whole, as text and
as token ids, which is verified for every row. A template that rewrites earlier turns (Qwen3 drops past reasoning) fails
that check and its row is refused, never masked by guess. The end-of-turn token is trained, the whitespace after it is
not.

Token ids always come from encoding a rendered text with `add_special_tokens=False`: a template that writes BOS has
written it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from automodel_cli.config.errors import DataError
from automodel_cli.data.config import Mask
from automodel_cli.data.formats import Conversation
from automodel_cli.data.rows import RowError

GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
TRAINING_TEMPLATE_FIX = "data.mask=last_turn, or data.chat_template=<a template with {% generation %} tags>"


@dataclass(frozen=True)
class Encoded:
    """Tokens of one document; `trained` says of each whether the model must learn to produce it.

    Of two documents that stay together the tokens follow each other: `split` are the first one's. `judgement` of such
    a row is 1 or 0 for a response judged good or bad.
    """

    ids: np.ndarray
    trained: np.ndarray
    split: int = 0
    judgement: int = -1


def resolve_chat_template(choice: str | None, tokenizer: Any) -> str | None:
    """The template's text: the tokenizer's for None, none for `none`, else a file's content or the text itself."""
    if choice is None:
        template = tokenizer.chat_template
        if isinstance(template, dict):
            raise DataError(
                f"the tokenizer has several chat templates: {', '.join(template)}",
                fix="data.chat_template=<a .jinja file with the one to train>",
            )
        return template
    if choice == "none":
        return None
    if "{%" in choice or "{{" in choice:
        return choice
    path = Path(choice).expanduser()
    if not path.is_file():
        raise DataError(f"chat_template={choice} is neither a file, nor 'none', nor a template (no {{{{ or {{% in it)")
    return path.read_text(encoding="utf-8")


class ChatEncoder:
    """Renders and encodes conversations with one template and one mask rule. Pickles, for worker processes."""

    def __init__(self, tokenizer: Any, template: str, mask: Mask):
        self.tokenizer, self.template, self.mask = tokenizer, template, mask
        self.uses_tags = mask != "all" and tokenizer.is_fast and bool(GENERATION_TAG.search(template))

    def encode(self, chats: Sequence[Conversation]) -> list[Encoded | RowError]:
        """Tokens and mask of each conversation, or the reason why it has none."""
        texts = self._render([(chat, len(chat.messages), False) for chat in chats])
        checked = [_attempt(self._check, chat, text) for chat, text in zip(chats, texts, strict=True)]
        good = [i for i, result in enumerate(checked) if not isinstance(result, RowError)]
        encode = self._by_tags if self.uses_tags else self._by_prefixes
        results = encode([chats[i] for i in good], [checked[i] for i in good])
        for i, result in zip(good, results, strict=True):
            checked[i] = result
        return checked

    # -- rendering

    def _render(self, jobs: Sequence[tuple[Conversation, int, bool]]) -> list[str | RowError]:
        """Text of the first n messages of each conversation, with the generation prompt after them where asked."""
        out: list[Any] = [None] * len(jobs)
        for prompt in (False, True):
            places = [i for i, job in enumerate(jobs) if job[2] == prompt]
            asked = [(jobs[i][0].messages[: jobs[i][1]], jobs[i][0].tools) for i in places]
            texts = self._apply_many(asked, tokenize=False, add_generation_prompt=prompt)
            for place, text in zip(places, texts, strict=True):
                out[place] = text
        return out

    def _apply_many(self, asked: Sequence[tuple[list[Any], Any]], **options: Any) -> list[Any]:
        """One call of the library for all conversations without tools: ten times as fast as one call for each."""
        out: list[Any] = [None] * len(asked)
        together = [i for i, (_, tools) in enumerate(asked) if tools is None]
        try:
            for place, result in zip(
                together, self._apply([asked[i][0] for i in together], None, **options), strict=True
            ):
                out[place] = result
        except RowError:  # of one of them: find out which
            pass
        for i, (messages, tools) in enumerate(asked):
            if out[i] is None:
                results = _attempt(self._apply, [messages], tools, **options)
                out[i] = results if isinstance(results, RowError) else results[0]
        return out

    def _apply(self, conversations: list[list[Any]], tools: Any, **options: Any) -> list[Any]:
        """The library's renderer: texts, or (ids, mask) pairs. What a template raises is the row's error."""
        if not conversations:
            return []
        try:
            out = self.tokenizer.apply_chat_template(conversations, tools=tools, chat_template=self.template, **options)
        except Exception as error:  # templates raise jinja's errors, and TypeError, KeyError, ... from the row's values
            reason = str(error).strip() or type(error).__name__
            raise RowError("template_error", f"the chat template refuses the row: {reason}") from error
        return out if isinstance(out, list) else list(zip(out["input_ids"], out["assistant_masks"], strict=True))

    # -- what is checked of every row, and which of its turns are trained

    def _check(self, chat: Conversation, text: str | RowError) -> str:
        """The rendered text, if it holds what the row holds.

        A template without a branch for a role or for tools leaves them out in silence; training would go on without.
        """
        if isinstance(text, RowError):
            raise text
        if self.mask != "all":
            self._turns(chat)
        for index, message in enumerate(chat.messages):
            said = message["content"].strip()
            if message["role"] in ("system", "developer", "user") and said not in text:
                head = said if len(said) <= 40 else f"{said[:36]} ..."
                raise RowError(
                    "dropped_by_template",
                    f"the chat template leaves out message {index} (role {message['role']!r}, {head!r})",
                    fix="data.chat_template=<a template that renders this role>, or rename the role in the data",
                )
        unnamed = [name for name in map(_tool_name, chat.tools or ()) if name not in text]
        if unnamed:
            raise RowError(
                "tools_ignored",
                f"the chat template does not render the row's tools ({unnamed[0]!r} is not in its text)",
                fix="data.chat_template=<a template with tools>, or data.columns='{tools: \"\"}' to train without them",
            )
        return text

    def _turns(self, chat: Conversation) -> list[int]:
        """Indices of the assistant messages that are trained under the mask rule. Raises when there is none."""
        spoken = _assistant_turns(chat)
        if not spoken:
            raise RowError("no_label_token", "the conversation has no assistant message, so nothing would be trained")
        chosen = [i for i in (spoken[-1:] if self.mask == "last_turn" else spoken) if chat.trained[i]]
        if not chosen:
            raise RowError("no_label_token", "every assistant message that the mask selects says train: false")
        return chosen

    def _located(self, chat: Conversation) -> list[int]:
        """The turns whose tokens must be found: the trained ones, or those held back when all else is trained."""
        if self.mask == "all":
            return [i for i in _assistant_turns(chat) if not chat.trained[i]]
        return self._turns(chat)

    # -- generation tags

    def _by_tags(self, chats: Sequence[Conversation], texts: Sequence[str]) -> list[Encoded | RowError]:
        asked = [(chat.messages, chat.tools) for chat in chats]
        options = {"return_assistant_tokens_mask": True, "return_dict": True, "tokenizer_kwargs": TOKENIZER_OPTIONS}
        pairs = self._apply_many(asked, **options)
        return [_attempt(self._select_runs, chat, pair) for chat, pair in zip(chats, pairs, strict=True)]

    def _select_runs(self, chat: Conversation, pair: tuple[list[int], list[int]] | RowError) -> Encoded:
        """The template's mask, less the turns that the row or the mask rule leaves out."""
        if isinstance(pair, RowError):
            raise pair
        ids, trained = _ids(pair[0]), np.asarray(pair[1], np.uint8)
        turns, spoken = self._turns(chat), _assistant_turns(chat)
        if turns != spoken:
            spans = _runs(trained)
            if len(spans) != len(spoken):
                raise RowError(
                    "generation_blocks",
                    f"the template marks {len(spans)} stretches as generated where the row has {len(spoken)} assistant "
                    "messages, so single turns cannot be told apart",
                    fix="data.mask=assistant without train: false, or a template with one generation block per turn",
                )
            trained = np.zeros_like(trained)
            for turn, (start, stop) in zip(spoken, spans, strict=True):
                trained[start:stop] = turn in turns
        return Encoded(ids, trained)

    # -- prefix difference

    def _by_prefixes(self, chats: Sequence[Conversation], texts: Sequence[str]) -> list[Encoded | RowError]:
        """Render and encode the text before and up to each located turn, for all rows at once; verify row by row."""
        turns = [self._located(chat) for chat in chats]
        jobs = []
        for chat, located in zip(chats, turns, strict=True):
            for turn in located:
                jobs += [(chat, turn, True), (chat, turn + 1, False)]
        rendered = iter(self._render(jobs))
        out: list[Any] = []
        for text, located in zip(texts, turns, strict=True):
            prefixes = [next(rendered) for _ in range(2 * len(located))]
            out.append(_attempt(_edges, text, located, prefixes))
        wanted = [text for row in out if not isinstance(row, RowError) for text in row]
        ids = iter(encode_texts(self.tokenizer, wanted))
        for i, row in enumerate(out):
            if not isinstance(row, RowError):
                out[i] = _attempt(self._between, turns[i], [next(ids) for _ in row])
        return out

    def _between(self, located: Sequence[int], pieces: Sequence[np.ndarray]) -> Encoded:
        """The mask from the ids of the whole text and of each turn's two prefixes."""
        ids, prefixes = pieces[0], pieces[1:]
        whole_row = self.mask == "all"
        trained = np.full(len(ids), whole_row, np.uint8)
        for turn, before, upto in zip(located, prefixes[::2], prefixes[1::2], strict=True):
            for prefix, side in ((before, "start"), (upto, "end")):
                if not np.array_equal(ids[: len(prefix)], prefix):
                    raise RowError(
                        "not_a_prefix",
                        f"a token reaches over the {side} of message {turn}, so the trained tokens are not those that "
                        "follow its prompt",
                        fix="data.chat_template=<a template with a special token or newline at the turn's edges>",
                    )
            trained[len(before) : len(upto)] = not whole_row
        return Encoded(ids, trained)


TOKENIZER_OPTIONS = {"return_attention_mask": False, "verbose": False}


def _attempt(function: Any, *args: Any, **options: Any) -> Any:
    """The result, or the row's error as a value, so that the other rows of the batch go on."""
    try:
        return function(*args, **options)
    except RowError as error:
        return error


def _assistant_turns(chat: Conversation) -> list[int]:
    return [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]


def _edges(whole: str, located: Sequence[int], prefixes: Sequence[str | RowError]) -> list[str]:
    """The whole text, then per turn the text before it and up to its end, trailing whitespace left out.

    Raises RowError unless each is a prefix of the whole and the generation prompt is how the template begins the turn.
    """
    texts = [whole]
    for turn, before, upto in zip(located, prefixes[::2], prefixes[1::2], strict=True):
        for text in (before, upto):
            if isinstance(text, RowError):
                raise text
            if not whole.startswith(text):
                raise RowError(
                    "not_a_prefix",
                    f"the chat template renders the text up to message {turn} differently once later messages follow, "
                    "so the tokens of that turn cannot be located",
                    fix=TRAINING_TEMPLATE_FIX,
                )
        assert isinstance(before, str) and isinstance(upto, str), "refused above"
        texts += [before, max(upto.rstrip(), before, key=len)]
    return texts


def encode_texts(tokenizer: Any, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[np.ndarray]:
    """Token ids of each text, int32. One call, so that a fast tokenizer uses its threads."""
    if not texts:
        return []
    out = tokenizer(list(texts), add_special_tokens=add_special_tokens, **TOKENIZER_OPTIONS)
    return [_ids(ids) for ids in out["input_ids"]]


def _ids(ids: Sequence[int]) -> np.ndarray:
    return np.asarray(ids, np.int32)


def _tool_name(tool: dict[str, Any]) -> str:
    return str(tool.get("function", tool).get("name", ""))


def _runs(flags: np.ndarray) -> list[tuple[int, int]]:
    """Start and stop of each stretch of ones."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags, [0])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
