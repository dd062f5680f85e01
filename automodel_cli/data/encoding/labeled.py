"""Tokens and targets of labeled rows. A text has exactly the tokens of `tokenizer(text)`, as at inference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from automodel_cli.config.errors import DataError
from automodel_cli.data.formats.examples import Example, LabeledText
from automodel_cli.data.labels import LabelSpec
from automodel_cli.data.row_errors import RowError, attempt
from automodel_cli.data.tokenized import TOKENIZER_OPTIONS, Encoded, around, as_ids, pad_or_eos

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class LabeledEncoder:
    """Encoder of labeled rows. Picklable, for worker processes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, labels: LabelSpec, *, add_special_tokens: bool):
        self._tokenizer, self._labels, self._add_special_tokens = tokenizer, labels, add_special_tokens
        if labels.of_tokens and not tokenizer.is_fast:
            raise DataError(
                "objective.token_level=true requires a fast tokenizer, which knows the characters of each token",
                code="not_supported_by_model",
                keys=("model.tokenizer",),
            )
        self._padding = padding_id(tokenizer)

    def encode(self, read: Sequence[Example | RowError]) -> list[Encoded | RowError]:
        """Return one result per row, in order."""
        return [attempt(self._encode, row) for row in read]

    def _encode(self, row: Example | RowError) -> Encoded:
        match row:
            case LabeledText(str(text)) if not self._labels.of_tokens:
                ids, _ = self._tokens(text)
                if self._padding is not None and ids[-1] == self._padding:
                    raise RowError("ends_with_padding", f"the text ends with the padding token {self._padding}")
                return Encoded(ids, np.ones(len(ids), np.uint8), targets=self._labels.target(row.label, row.column))
            case LabeledText(tuple(words) | list(words)) if self._labels.of_tokens:
                of_word = [self._labels.index(tag, row.column) for tag in row.label]
                ids, spans = self._tokens(" ".join(words))
                return Encoded(ids, np.ones(len(ids), np.uint8), classes=_of_tokens(words, of_word, spans))
        if isinstance(row, RowError):
            raise row
        has, needs = ("text and label", "tokens and tags") if self._labels.of_tokens else ("words", "texts")
        raise RowError("bad_label", f"the row has {has}, but objective.token_level needs {needs}")

    def _tokens(self, text: str) -> tuple[np.ndarray, Sequence[tuple[int, int]]]:
        """Return ids, and the characters of each token if tokens are labeled."""
        offsets = {"return_offsets_mapping": True} if self._labels.of_tokens else {}
        found = self._tokenizer(text, add_special_tokens=self._add_special_tokens, **offsets, **TOKENIZER_OPTIONS)
        if not found["input_ids"]:
            raise RowError("empty", "the text has no token")
        return as_ids(found["input_ids"]), found.get("offset_mapping", ())


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the padding token of exported classifiers, which pool at the last token that differs from it.

    The tokenizer's padding token, else its EOS. None if the tokenizer itself ends texts with this token. The classifier
    then accepts one row at a time.
    """
    pad = pad_or_eos(tokenizer)
    return None if pad in around(tokenizer)[1][-1:] else pad


def _of_tokens(words: Sequence[str], of_word: Sequence[int], spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the class of the word of each token, int16. -1 for tokens outside words.

    A token that begins with the space before a word belongs to the word.
    """
    ends = np.cumsum([len(word) + 1 for word in words]) - 1  # after each word, where its space begins
    starts = ends - [len(word) for word in words]
    classes = np.full(len(spans), -1, np.int16)
    for token, (begin, end) in enumerate(spans):
        if end <= begin:
            continue
        word = int(np.searchsorted(ends, end - 1, side="right"))  # the word of the token's last character
        if word < len(words) and end > starts[word]:
            classes[token] = of_word[word]
    return classes
