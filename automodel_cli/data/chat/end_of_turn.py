"""Find the token that ends a turn.

A model stops where it learned to stop, so every trained turn must end with a token that stops generation. This is the
end token of the template. If the template writes none, the token at which generation stops is appended.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from automodel_cli.data.formats.examples import Messages
from automodel_cli.data.row_errors import RowError
from automodel_cli.data.tokenized import encode_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAID, _NEXT = "kwelvorn", "zindrath"
"""Markers that occur in no template."""
_QUESTION: dict[str, object] = {"role": "user", "content": "?"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"at": _SAID}}}
_PROBES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "answer": ({"role": "assistant", "content": _SAID}, {"role": "user", "content": _NEXT}),
    "call": (
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": _NEXT, "tool_call_id": "call00000", "name": "look"},
    ),
}

Render = Callable[[Messages, None], str]
"""Render messages without a generation prompt. Raises RowError if the template rejects them."""


@dataclass(frozen=True)
class TurnEnds:
    """Tokens that stop generation, and the token to append to a turn that the template leaves open.

    `stops`: EOS of the tokenizer and the stop tokens of the model's configs. `after`: token to append by kind of turn.
    Example: GLM-4.5 ends a response with the `<|user|>` of the next message, and a tool call with `<|observation|>`.
    Other models get EOS.
    """

    stops: frozenset[int]
    special: frozenset[int]
    after: dict[str, int]
    eos: int | None
    _spaces: dict[int, bool] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, render: Render, stop_ids: Collection[int] = ()) -> TurnEnds:
        """Ids in `stop_ids` that are not special tokens of the tokenizer are ignored: random models have arbitrary
        ids."""
        special = frozenset({*tokenizer.all_special_ids, *_special_added(tokenizer)})
        known = special | frozenset(tokenizer.added_tokens_decoder)
        eos = tokenizer.eos_token_id
        stops = frozenset(i for i in (eos, *stop_ids) if i is not None and (i in known or i == eos))
        tokens = {kind: _follows(tokenizer, render, kind) for kind in _PROBES}
        after = {kind: token for kind, token in tokens.items() if token is not None and token in stops}
        return cls(stops, special, after, eos)

    def end(
        self, ids: np.ndarray, start: int, stop: int, kind: str, *, tokenizer: PreTrainedTokenizerBase
    ) -> int | None:
        """Return the end of the turn with the text `ids[start:stop]`, including its stop token. None: there is none.

        Searched in this order:

        1. A stop token among the special tokens and white space at the end of the turn.
        2. The token that follows in `ids`, if it is a stop token.
        3. The last special token of the turn. It is the template's end token, although generation may not stop at it.
        """
        first = stop
        while first > start and (ids[first - 1] in self.special or self._is_space(int(ids[first - 1]), tokenizer)):
            first -= 1
        tail = ids[first:stop].tolist()
        for place, token in enumerate(tail):
            if token in self.stops:
                return first + place + 1
        if stop < len(ids) and int(ids[stop]) in self.stops:
            return stop + 1
        marks = [place for place, token in enumerate(tail) if token in self.special]
        return first + marks[-1] + 1 if marks and kind not in self.after else None

    def missing(self, kind: str) -> int:
        """Return the token to append to an open turn. Raises RowError if there is none."""
        token = self.after.get(kind, self.eos)
        if token is None:
            raise RowError(
                "no_stop",
                "the chat template writes no token that ends an assistant turn and the tokenizer has no EOS token, so "
                "the model would not learn to stop",
                fix="data.chat_template=<a template that ends turns with a special token>",
            )
        return token

    def _is_space(self, token: int, tokenizer: PreTrainedTokenizerBase) -> bool:
        if token not in self._spaces:
            self._spaces[token] = not str(tokenizer.decode([token])).strip()
        return self._spaces[token]


def kind_of(message: dict[str, object]) -> str:
    """`call` for an assistant turn that a tool answers, else `answer`."""
    return "call" if message.get("tool_calls") else "answer"


def _special_added(tokenizer: PreTrainedTokenizerBase) -> Sequence[int]:
    return [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]


def _follows(tokenizer: PreTrainedTokenizerBase, render: Render, kind: str) -> int | None:
    """Return the first token that the template writes between a turn and the text of the next message."""
    turn, following = _PROBES[kind]
    try:
        alone, continued = render([_QUESTION, turn], None), render([_QUESTION, turn, following], None)
    except RowError:
        return None
    rest = alone.rpartition(_SAID)[2].rstrip()
    between = continued.rpartition(_NEXT)[0].rpartition(_SAID)[2]
    if _SAID not in alone or _NEXT not in continued or not between.startswith(rest):
        return None
    (ids,) = encode_texts(tokenizer, [between[len(rest) :]])
    return int(ids[0]) if len(ids) else None
