"""Select the trained turns of a conversation, and locate turns in its text and in its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from automodel_cli.data.chat.end_of_turn import TurnEnds, kind_of
from automodel_cli.data.config import Mask
from automodel_cli.data.formats.examples import Conversation
from automodel_cli.data.row_errors import RowError, unwrap
from automodel_cli.data.tokenized import Encoded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNROLL_FIX = "data.multi_turn=per_turn, or data.multi_turn=auto"
TurnSpan = tuple[int, tuple[int, int]]
"""Index of a message, and where its tokens begin and end."""


def assistant_turns(chat: Conversation) -> list[int]:
    """Return the indices of the assistant messages."""
    return [i for i, message in enumerate(chat.messages) if message["role"] == "assistant"]


def selected_turns(chat: Conversation, mask: Mask) -> list[int]:
    """Return the indices of the assistant messages that the mask rule trains. Raises RowError if there is none."""
    spoken = assistant_turns(chat)
    if not spoken:
        raise RowError("no_label_token", "the conversation has no assistant message to train on")
    chosen = [i for i in (spoken[-1:] if mask == "last_turn" else spoken) if chat.trained[i]]
    if not chosen:
        raise RowError("no_label_token", "every assistant message that data.loss_mask selects has train: false")
    return chosen


def located_turns(chat: Conversation, mask: Mask) -> list[int]:
    """Return the turns whose tokens must be located: trained turns, or untrained turns if the mask is `all`."""
    if mask == "all":
        return [i for i in assistant_turns(chat) if not chat.trained[i]]
    return selected_turns(chat, mask)


def turn_texts(
    whole: str, located: Sequence[int], prefixes: Sequence[str | RowError], eos_token: str | None
) -> list[str]:
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
    for turn, given, shown in zip(located, prefixes[::2], prefixes[1::2], strict=True):
        before, upto = unwrap(given), unwrap(shown)
        if eos_token and not whole.startswith(upto):
            upto = upto.rstrip().removesuffix(eos_token)
        for text in (before, upto):
            if not whole.startswith(text):
                raise RowError(
                    "not_a_prefix",
                    f"the chat template renders the text up to message {turn} differently once later messages follow, "
                    "so one document cannot contain every turn as the model will see it",
                    fix=UNROLL_FIX,
                )
        texts += [before, max(upto.rstrip(), before, key=len)]
    return texts


def prefix_spans(located: Sequence[int], pieces: Sequence[np.ndarray]) -> list[TurnSpan]:
    """Return where the ids of each turn begin and end in the ids of the full text.

    `pieces`: token ids of the full text, then for each located turn the ids of the prefix before the turn and of the
    prefix up to its end. Raises RowError if a prefix is not a prefix of the full text.
    """
    ids, prefixes = pieces[0], pieces[1:]
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
    return spans


def trained_turns(
    tokenizer: PreTrainedTokenizerBase,
    turn_ends: TurnEnds,
    chat: Conversation,
    ids: np.ndarray,
    spans: Sequence[TurnSpan],
) -> Encoded:
    """Return the document in which the given turns are trained, each including its stop token.

    If the template writes no stop token after the last turn, it is appended. If other text follows the turn,
    RowError is raised, because the token would have to be inserted before this text.
    """
    ends = []
    for turn, (start, stop) in spans:
        kind = kind_of(chat.messages[turn])
        end = turn_ends.end(ids, start, stop, kind, tokenizer=tokenizer)
        if end is None:
            token = turn_ends.missing(kind)
            if str(tokenizer.decode(ids[stop:])).strip():
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


def block_spans(trained: np.ndarray, spoken: Sequence[int], selected: Sequence[int]) -> list[TurnSpan] | None:
    """Return the generation blocks of the selected turns, or None if the blocks of all assistant turns are trained
    although their number differs. Raises RowError if single turns cannot be selected.

    Args:
        trained: 1 for each token inside a generation block.
        spoken: indices of the assistant messages.
        selected: indices of the trained ones.
    """
    blocks = _runs(trained)
    if len(blocks) == len(spoken):
        return [(turn, block) for turn, block in zip(spoken, blocks, strict=True) if turn in selected]
    if selected != spoken:
        raise RowError(
            "generation_blocks",
            f"the template renders {len(blocks)} generation blocks for {len(spoken)} assistant messages, so "
            "single turns cannot be selected",
            fix="data.loss_mask=assistant without train: false, or a template with one generation block per turn",
        )
    return None


def _runs(flags: np.ndarray) -> list[tuple[int, int]]:
    """Return start and stop of each run of ones: [0, 1, 1, 0, 1] gives [(1, 3), (4, 5)]."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags, [0])).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
