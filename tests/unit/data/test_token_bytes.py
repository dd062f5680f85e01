"""Bytes of tokens against the bytes of texts, for the kinds of tokenizers that models use."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.token_bytes import token_bytes
from automodel_cli.models.tokenizer import ByteTokenizer
from tests.errors import raises

TEXTS = ("Add 3 and 4.\n\tdef f(x): return x", "Größe 東京 🙂 naïve", "  two  spaces ")


def pieces() -> PreTrainedTokenizerFast:
    """A tokenizer in the manner of SentencePiece with byte fallback."""
    words = ["<unk>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "▁", "▁two", "A", "d", "ö", "東"]
    vocab = {token: number for number, token in enumerate(words)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")


@pytest.mark.parametrize("make", [ByteTokenizer().build, pieces])
@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_the_tokens_sum_to_those_of_the_text(make, text):
    tokenizer = make()
    counts = token_bytes(tokenizer, 0)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert counts[ids].sum() == len(text.encode())
    assert counts[tokenizer.eos_token_id] == 0


def test_added_words_count_and_special_tokens_do_not():
    tokenizer = ByteTokenizer().build()
    tokenizer.add_tokens([AddedToken("größer", special=False)])
    size = len(tokenizer) + 7
    counts = token_bytes(tokenizer, size)
    assert len(counts) == size and counts[tokenizer.convert_tokens_to_ids("größer")] == len("größer".encode())
    assert not counts[tokenizer.all_special_ids].any() and not counts[len(tokenizer) :].any()


def test_a_tokenizer_that_changes_the_text_is_rejected():
    tokenizer = pieces()
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    with raises(
        ConfigError, "not_supported_by_model", keys=("objective.bits_per_byte",), fix="objective.bits_per_byte=false"
    ):
        token_bytes(tokenizer, 0)
