"""Normalized words of a text as hashes, and hashes of their n-grams.

Words are in lower case, without punctuation and in Unicode form NFKC. Scripts without spaces between words count each
character as a word.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

import numpy as np
import xxhash

_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
"""Thai and Lao, Burmese, Khmer, kana, and Chinese characters."""
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_REMEMBERED = 1 << 20
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
Hashes = np.ndarray[Any, np.dtype[np.uint64]]


class WordHasher:
    """Hashes of words. It remembers those of frequent words."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def __call__(self, text: str) -> Hashes:
        """Return the hash of each word of a text, uint64 (words,)."""
        normal = text if text.isascii() else unicodedata.normalize("NFKC", text)
        words = _WORD.findall(normal.lower())
        known = self._known
        if len(known) > _REMEMBERED:
            known.clear()
        for word in words:
            if word not in known:
                known[word] = xxhash.xxh3_64_intdigest(word.encode("utf-8", "surrogatepass"))
        return np.fromiter((known[word] for word in words), np.uint64, len(words))


def ngram_hashes(words_W: Hashes, n: int) -> Hashes:
    """Return the hash of every n consecutive words, uint64 (words - n + 1,). Empty if there are fewer words."""
    if len(words_W) < n:
        return np.zeros(0, np.uint64)
    hashes = np.full(len(words_W) - n + 1, n, np.uint64)
    for k in range(n):
        hashes = hashes * _FACTOR + words_W[k : k + len(hashes)]
    return mixed(hashes)


def mixed(values: Hashes) -> Hashes:
    """Return the values after the last step of splitmix64, which spreads each bit over all bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Hashes = values ^ (values >> np.uint64(31))
    return result
