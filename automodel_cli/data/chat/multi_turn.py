"""Unroll a conversation into one document per trained turn, each with the history that the model sees at inference.

The document of turn i is the rendering of the previous messages with the generation prompt, followed by the turn and
its stop token. This is correct for every template, including those that render earlier turns differently. The cost is
the repetition of histories: three turns of 100 tokens become documents of 100, 200 and 300 tokens.

The text of a turn is the part of the rendered conversation after the prompt. Two kinds of templates need more work:

- The turn changes the rendering of earlier messages (gpt-oss removes the reasoning before a tool call once an answer
  follows). The text of the turn is located by rendering another turn in its place.
- The generation prompt opens a reasoning block that the template does not render in the turn (DeepSeek-R1,
  Nemotron-3). The model must close the block, so the document contains the reasoning of the row, or an empty block.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from automodel_cli.data.chat.end_of_turn import TurnEnds
from automodel_cli.data.formats.examples import Message
from automodel_cli.data.formats.messages import REASONING_KEYS
from automodel_cli.data.row_errors import RowError
from automodel_cli.data.tokenized import Encoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TurnPieces = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Token ids of a prompt, of the prompt and the turn as one text, and of the turn."""
OPEN, CLOSE = "<think>", "</think>"
STAND_IN = {"role": "assistant", "content": "kwelvorn"}
"""Replacement turn. No answer begins with its content."""


@dataclass(frozen=True)
class TurnTexts:
    """Renderings around one turn.

    `prompt`: earlier messages with the generation prompt. `history`: earlier messages without it. `upto`: messages up
    to and including the turn. `other`: the same with a replacement turn.
    """

    prompt: str
    history: str
    upto: str
    other: str


def continuation(texts: TurnTexts, message: Message) -> str:
    """Return the text of a turn after `texts.prompt`, including white space at its end.

    Raises RowError if the rendered turn does not begin with the generation prompt.
    """
    prompt, upto = texts.prompt, texts.upto
    if upto.startswith(prompt):
        return upto[len(prompt) :]
    cue = prompt[len(texts.history) :] if prompt.startswith(texts.history) else ""
    before, opened, space = prompt.rpartition(OPEN)
    if opened and not space.strip():
        if upto.startswith(before + OPEN):
            return upto[len(before + OPEN) :].lstrip()
        if upto.startswith(before):
            return _close_reasoning(upto[len(before) :], message)
    shared = _shared_start(upto, texts.other)
    head, separator, _ = shared.rpartition(cue) if cue else ("", "", "")
    if separator:
        return upto[len(head) + len(cue) :]
    if prompt.rstrip().endswith(CLOSE) and reasoning_of(message):
        raise RowError(
            "not_a_prefix",
            "the generation prompt closes the reasoning block, but the turn of the row has reasoning",
            fix="data.chat_template=<the template with thinking enabled>, or remove the reasoning from the data",
        )
    raise RowError(
        "not_a_prefix",
        f"the chat template does not begin a turn with its generation prompt ({prompt[-24:]!r})",
        fix="data.chat_template=<a template whose turns begin with its generation prompt>",
    )


def _shared_start(a: str, b: str) -> str:
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return a[:length]


def _close_reasoning(turn: str, message: Message) -> str:
    """The turn with the reasoning that the template leaves out, which the generation prompt has opened."""
    if OPEN in turn or CLOSE in turn:
        return turn.lstrip().removeprefix(OPEN).lstrip("\n")
    return f"{reasoning_of(message)}\n{CLOSE}\n\n{turn.lstrip(chr(10))}"


def reasoning_of(message: Message) -> str:
    """Return the reasoning of an assistant message: its separate field, or the `<think>` block of its content."""
    for key in REASONING_KEYS:
        if message.get(key):
            return str(message[key]).strip("\n")
    head, closed, _ = message["content"].rpartition(CLOSE)
    return head.rpartition(OPEN)[2].strip("\n") if closed else ""


def turn_document(tokenizer: PreTrainedTokenizerBase, ends: TurnEnds, pieces: TurnPieces, kind: str) -> Encoded:
    """Return the document of one turn, trained up to its stop token.

    If the tokens of the prompt are a prefix of the tokens of the text, the text is used. Otherwise prompt and turn are
    encoded separately, because the model sees the tokens of the prompt alone at inference.
    """
    given, ids, alone = pieces
    # Example: the prompt ends with "\n" and the turn begins with "\n". One text gives a token "\n\n" that is in neither
    # part. At inference the model sees the prompt's "\n" token, so training must too.
    if not np.array_equal(ids[: len(given)], given):
        apart = np.concatenate([given, alone])
        if tokenizer.decode(apart) != tokenizer.decode(ids):
            where = f"{tokenizer.decode(given)[-12:]!r} + {tokenizer.decode(alone)[:12]!r}"
            raise RowError(
                "not_a_prefix",
                f"a token crosses the end of the generation prompt ({where})",
                fix="data.chat_template=<a template with a special token or newline before the turn>",
            )
        ids = apart
    end = ends.end(ids, len(given), len(ids), kind, tokenizer=tokenizer)
    ids = np.append(ids, np.int32(ends.missing(kind))) if end is None else ids[:end]
    trained = np.ones(len(ids), np.uint8)
    trained[: len(given)] = 0
    return Encoded(ids, trained)


def reasoning_key(template: str) -> str | None:
    """The name under which a template reads the reasoning of a message, if it does."""
    return next((key for key in REASONING_KEYS if re.search(rf"""(\.|['"]){key}\b(?!\s*\()""", template)), None)


def with_key(message: Message, key: str) -> Message:
    """The message with its reasoning under the name that the template reads."""
    given = [name for name in REASONING_KEYS if name in message]
    if not given or key in given:
        return message
    return {**{name: value for name, value in message.items() if name not in given}, key: message[given[0]]}
