"""What a row becomes: token ids, and which of them are trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TOKENIZER_OPTIONS = {"return_attention_mask": False, "verbose": False}


@dataclass(frozen=True)
class Encoded:
    """Tokens of one document; `trained` says of each whether the model must learn to produce it.

    Of two documents that stay together the tokens follow each other: `split` are the first one's. `judgement` of such
    a row is 1 or 0 for a response judged good or bad, `margin` that of a pair. `num_special`: special tokens in the
    row's own text.
    """

    ids: np.ndarray
    trained: np.ndarray
    split: int = 0
    judgement: int = -1
    margin: float = 0.0
    num_special: int = 0


@dataclass(frozen=True)
class Unrolled:
    """A conversation as several documents, one for each trained turn, in their order (`data/chat/multi_turn.py`)."""

    documents: tuple[Encoded, ...]


def split_documents(item: Encoded | Unrolled) -> tuple[Encoded, ...]:
    """The documents of one row."""
    return item.documents if isinstance(item, Unrolled) else (item,)


def encode_texts(tokenizer: Any, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[np.ndarray]:
    """Token ids of each text, int32. One call, so that a fast tokenizer uses its threads."""
    if not texts:
        return []
    out = tokenizer(list(texts), add_special_tokens=add_special_tokens, **TOKENIZER_OPTIONS)
    return [as_ids(ids) for ids in out["input_ids"]]


def around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer adds before and after a text by itself: BOS in most, EOS in some."""
    bare, dressed = (list(tokenizer("a", add_special_tokens=flag)["input_ids"]) for flag in (False, True))
    at = next(i for i in range(len(dressed)) if dressed[i : i + len(bare)] == bare)
    return dressed[:at], dressed[at + len(bare) :]


def as_ids(ids: Sequence[int]) -> np.ndarray:
    """Token ids as an array, int32."""
    return np.asarray(ids, np.int32)
