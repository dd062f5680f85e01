"""Encode a text and its prefixes for the cost of the text alone.

A fast tokenizer first splits a text at its special tokens, by literal match, and encodes the parts between them
separately. The ids of a prefix are therefore the ids of the text up to the last special token inside the prefix,
followed by the ids of the remaining characters. Only these, often the header of a turn or nothing, are encoded again.
They are encoded with the special token in front, because some tokenizers treat the start of a text differently. The
result equals that of encoding every prefix separately. Token offsets would only be an estimate: a prefix may end in
other tokens than the text has there.

Example: the prefix `<s>Hi the` of `<s>Hi there` ends inside the token ` there`. Its ids are those of `<s>`, then those
of `Hi the`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from automodel_cli.data.tokenized import TOKENIZER_OPTIONS, as_ids, encode_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHORT = 100
"""Characters: rests up to this length recur in every row and are remembered."""
MAX_REMEMBERED = 10_000


class PrefixEncoder:
    """Encodes texts together with their prefixes, without adding special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        # tokens that strip spaces, match whole words or match after normalization split elsewhere
        self.cuts: dict[int, str] = {
            number: token.content
            for number, token in tokenizer.added_tokens_decoder.items()
            if not (token.normalized or token.single_word or token.lstrip or token.rstrip)
        }
        self.remembered: dict[str, np.ndarray] = {}

    def encode(self, rows: Sequence[Sequence[str]]) -> list[list[np.ndarray]]:
        """Per row the ids, int32, of its first text and of each other, which must be a prefix of the first."""
        if not rows:
            return []
        if not self.tokenizer.is_fast:
            each = iter(encode_texts(self.tokenizer, [text for row in rows for text in row]))
            return [[next(each) for _ in row] for row in rows]
        out = self.tokenizer([row[0] for row in rows], add_special_tokens=False, **TOKENIZER_OPTIONS)
        as_text = self.tokenizer.backend_tokenizer.encode_special_tokens  # then special tokens do not split the text
        cuts = {} if as_text else self.cuts
        last_special = [
            [_last_cut(encoding, ids, row[0], len(prefix), cuts) for prefix in row[1:]]
            for encoding, ids, row in zip(out.encodings, out["input_ids"], rows, strict=True)
        ]
        rests = [
            [prefix[character:] for prefix, (_, character) in zip(row[1:], at, strict=True)]
            for row, at in zip(rows, last_special, strict=True)
        ]
        known = self._encode_rests(rests)
        result: list[list[np.ndarray]] = []
        for ids, at, of_row in zip(map(as_ids, out["input_ids"]), last_special, rests, strict=True):
            pairs = zip(at, of_row, strict=True)
            result.append([ids, *(np.concatenate([ids[:token], known[rest]]) for (token, _), rest in pairs)])
        return result

    def _encode_rests(self, rests: Sequence[Sequence[str]]) -> dict[str, np.ndarray]:
        unique = dict.fromkeys(rest for row in rests for rest in row)
        new = [rest for rest in unique if rest not in self.remembered]
        encoded = dict(zip(new, encode_texts(self.tokenizer, new), strict=True))
        known = {rest: encoded[rest] if rest in encoded else self.remembered[rest] for rest in unique}
        if len(self.remembered) < MAX_REMEMBERED:
            self.remembered.update((rest, ids) for rest, ids in encoded.items() if len(rest) <= SHORT)
        return known


def _last_cut(encoding: Any, ids: Sequence[int], text: str, stop: int, cuts: dict[int, str]) -> tuple[int, int]:
    """Return token and character index of the last special token before character `stop`; 0 and 0 if there is none."""
    token = None
    for character in range(stop - 1, -1, -1):  # spaces may belong to no token
        token = encoding.char_to_token(character)
        if token is not None:
            break
    if token is None:
        return 0, 0
    for place in range(token, -1, -1):
        content = cuts.get(ids[place])
        if content is None:
            continue
        start, end = encoding.token_to_chars(place)
        if end <= stop and text[start:end] == content:  # exclude unknown words with the same id
            return place, start
    return 0, 0
