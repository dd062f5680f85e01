"""Which token ends a turn. The model stops where it was taught to, so every trained turn ends with a token that ends
generation: the template's own, or, where the template writes none, the one that generation stops at.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from automodel_cli.data.row_errors import RowError
from automodel_cli.data.tokenized import encode_texts

_SAID, _NEXT = "kwelvorn", "zindrath"
"""Words of the probe that no template writes."""
_QUESTION: dict[str, Any] = {"role": "user", "content": "?"}
_CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"at": _SAID}}}
_PROBES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "answer": ({"role": "assistant", "content": _SAID}, {"role": "user", "content": _NEXT}),
    "call": (
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "content": _NEXT, "tool_call_id": "call00000", "name": "look"},
    ),
}

Render = Callable[[list[dict[str, Any]], None], str]
"""Messages to the template's text without a generation prompt; raises RowError where the template refuses them."""


@dataclass(frozen=True)
class TurnEnds:
    """The tokens at which generation stops (`stops`: the tokenizer's EOS and those of the model's configs), and which
    of them belongs after a turn that the template leaves open. GLM-4.5 ends an answer with the `<|user|>` of the next
    message and a call with `<|observation|>`: `after` has both, by the kind of turn. Others get EOS.
    """

    stops: frozenset[int]
    special: frozenset[int]
    after: dict[str, int]
    eos: int | None
    _spaces: dict[int, bool] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, tokenizer: Any, render: Render, stop_ids: Collection[int] = ()) -> TurnEnds:
        """`stop_ids` that are no special token of the tokenizer are ignored: random models have configs with any."""
        special = frozenset({*tokenizer.all_special_ids, *_special_added(tokenizer)})
        known = special | frozenset(tokenizer.added_tokens_decoder)
        eos = tokenizer.eos_token_id
        stops = frozenset(i for i in (eos, *stop_ids) if i is not None and (i in known or i == eos))
        found = {kind: _follows(tokenizer, render, kind) for kind in _PROBES}
        after = {kind: token for kind, token in found.items() if token is not None and token in stops}
        return cls(stops, special, after, eos)

    def end(self, ids: np.ndarray, start: int, stop: int, kind: str, *, tokenizer: Any) -> int | None:
        """Where a turn whose text is `ids[start:stop]` ends, its stop token included; None where it has none.

        Looked for in this order: a stop in the special tokens and white space that the turn ends with; the token that
        follows in `ids`, if it is a stop; the last special token of the turn, which is the template's own end mark
        though generation is not known to stop there.
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
        """The token to add to a turn that the template leaves open. Raises RowError when there is none."""
        token = self.after.get(kind, self.eos)
        if token is None:
            raise RowError(
                "no_stop",
                "the chat template writes no token that ends an assistant turn and the tokenizer has no EOS token, so "
                "the model would not learn to stop",
                fix="data.chat_template=<a template that ends turns with a special token>",
            )
        return token

    def _is_space(self, token: int, tokenizer: Any) -> bool:
        if token not in self._spaces:
            self._spaces[token] = not tokenizer.decode([token]).strip()
        return self._spaces[token]


def kind_of(message: dict[str, Any]) -> str:
    """`call` for an assistant turn that a tool answers, else `answer`."""
    return "call" if message.get("tool_calls") else "answer"


def _special_added(tokenizer: Any) -> Sequence[int]:
    return [i for i, token in tokenizer.added_tokens_decoder.items() if token.special]


def _follows(tokenizer: Any, render: Render, kind: str) -> int | None:
    """The first token that the template writes between a turn and the text of the message that follows it."""
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
