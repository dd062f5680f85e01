"""Tokens of a document with their loss mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from automodel_cli.data.picture import Picture
from automodel_cli.data.row_errors import RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_OPTIONS = {"return_attention_mask": False, "verbose": False}


@dataclass(frozen=True)
class Encoded:
    """Tokens of one document.

    Attributes:
        trained: for each token, whether it has loss.
        split: length of the first of two concatenated documents (pairs, rated responses).
        judgement: 1 for a good, 0 for a bad response of a rated row.
        margin: margin of a pair.
        num_special: special tokens in the text of the row.
        parts: length of each of the concatenated documents of a group.
        targets: of a labeled text (`data.labels.LabelSpec.target`).
        classes: class of each token of labeled words, int16. -1 for none.
        infill: `UNCHANGED`, `MOVED` or `TOO_LONG` of `data.fill_in_the_middle`.
        pictures: `data.pictures.content.Picture` of each run of placeholders, in order.
        num_first_pictures: how many of them belong to the first of two concatenated documents.
    """

    ids: np.ndarray
    trained: np.ndarray
    split: int = 0
    judgement: int = -1
    margin: float = 0.0
    num_special: int = 0
    infill: int = 0
    pictures: tuple[Picture, ...] = ()
    num_first_pictures: int = 0
    targets: tuple[float, ...] = ()
    parts: tuple[int, ...] = ()
    classes: np.ndarray | None = None


@dataclass(frozen=True)
class Unrolled:
    """A conversation as several documents, one for each trained turn, in their order (`data/chat/multi_turn.py`)."""

    documents: tuple[Encoded, ...]


EncodedRow = Encoded | Unrolled | RowError
"""Result of a row."""


def split_documents(item: Encoded | Unrolled) -> tuple[Encoded, ...]:
    """The documents of one row."""
    return item.documents if isinstance(item, Unrolled) else (item,)


def pad_or_eos(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Return the padding token of a tokenizer, else its EOS, else None."""
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), None)


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, add_special_tokens: bool = False
) -> list[np.ndarray]:
    """Token ids of each text, int32. One call, so that a fast tokenizer uses its threads."""
    if not texts:
        return []
    out = tokenizer(list(texts), add_special_tokens=add_special_tokens, **TOKENIZER_OPTIONS)
    return [as_ids(ids) for ids in out["input_ids"]]


def around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer adds before and after a text by itself: BOS in most, EOS in some."""
    bare, dressed = (list(tokenizer("a", add_special_tokens=flag)["input_ids"]) for flag in (False, True))
    at = next(i for i in range(len(dressed)) if dressed[i : i + len(bare)] == bare)
    return dressed[:at], dressed[at + len(bare) :]


def as_ids(ids: Sequence[int]) -> np.ndarray:
    """Token ids as an array, int32."""
    return np.asarray(ids, np.int32)
