"""Number of UTF-8 bytes of each token, for bits per byte.

Byte-level tokenizers write each byte of the text as one character of the token. Others write characters, with `▁` for a
space and `<0x0A>` for a single byte. Special tokens are no text: 0 bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from automodel_cli.config.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def token_bytes(tokenizer: PreTrainedTokenizerBase, size: int) -> np.ndarray:
    """Return the number of bytes of each token id, int64 of shape (max(size, vocabulary),). 0 for ids without a token.

    Args:
        size: number of the model's logits, which may exceed the vocabulary.

    Raises:
        ConfigError: the tokens do not determine the text, for example because the tokenizer lowercases it.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    byte_level = _is_byte_level(tokenizer)
    counts = np.zeros(max(size, max(vocabulary.values()) + 1), np.int64)
    for token, number in vocabulary.items():
        counts[number] = _num_bytes(token, byte_level)
    for number, added in tokenizer.added_tokens_decoder.items():
        counts[number] = 0 if added.special else len(added.content.encode())
    counts[list(tokenizer.all_special_ids)] = 0
    _check(tokenizer, counts)
    return counts


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    if not tokenizer.is_fast:
        return False
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}
    return any(part.get("type") == "ByteLevel" for part in (decoder, *decoder.get("decoders", ())))


def _num_bytes(token: str, byte_level: bool) -> int:
    if byte_level:
        return len(token)
    return 1 if _BYTE.fullmatch(token) else len(token.replace("▁", " ").encode())


_SAMPLES = ("The cat sat on the mat.\n    return x[0] == 'A'\n", "Größe, naïve, 東京 🙂")


def _check(tokenizer: PreTrainedTokenizerBase, counts: np.ndarray, samples: Sequence[str] = _SAMPLES) -> None:
    """Raise ConfigError if the counts of a sample text do not sum to its bytes. A space may be added in front."""
    for text in samples:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        counted, length = int(counts[ids].sum()), len(text.encode())
        if not length <= counted <= length + 1:
            raise ConfigError(
                f"bits_per_byte=true is not supported with {type(tokenizer).__name__}: its tokens of {text!r} have "
                f"{counted} bytes, but the text has {length}",
                code="not_supported_by_model",
                keys=("objective.bits_per_byte",),
                fix="objective.bits_per_byte=false",
            )
