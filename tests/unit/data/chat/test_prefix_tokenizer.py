"""Ids of prefixes without encoding each: those that the tokenizer gives for the prefix alone, whatever it is."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from automodel_cli.data.chat.prefix_tokenizer import PrefixEncoder
from automodel_cli.data.encoding.workers import choose_workers
from automodel_cli.data.tokenized import encode_texts

TEXT = "a small text about chat templates and the answer is seven don't ( ) -- 1234567 Ü \ufb01 é 你好 \U0001f600"
SPACES = ["", "\n", "\n\n", "\n\n\n", "\t", " ", "   "]
WORDS = [*TEXT.split(), *SPACES, "<|im_", "|>", "<unk>", "of of", "x" * 30, "<tool>", "[MASK]"]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "<|im_start|>assistant\n", "<|end|>"]
LLAMA_SPLIT = Regex(
    r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def with_pieces(model, trainer, pre_tokenizer, normalizer=None) -> Tokenizer:
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.train_from_iterator([" ".join(WORDS), "a small text, the answer is seven"] * 20, trainer)
    return backend


def bpe(pre_tokenizer, normalizer=None, vocab_size=420) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    return with_pieces(models.BPE(), trainer, pre_tokenizer, normalizer)


def unigram(scheme: str, normalizer=None) -> Tokenizer:
    trainer = trainers.UnigramTrainer(vocab_size=150, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    return with_pieces(models.Unigram(), trainer, pre_tokenizers.Metaspace(prepend_scheme=scheme), normalizer)


def word_piece() -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    normalizer = normalizers.BertNormalizer(lowercase=True)
    return with_pieces(models.WordPiece(unk_token="[UNK]"), trainer, pre_tokenizers.BertPreTokenizer(), normalizer)


def whole_text() -> Tokenizer:
    """Without a pre-tokenizer, as Llama 2 and Gemma: a merge may reach over anything but a special token."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    return backend


llama_like = pre_tokenizers.Sequence(
    [pre_tokenizers.Split(LLAMA_SPLIT, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
)
TOKENIZERS = {
    "gpt2": lambda: bpe(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gpt2 with a space in front": lambda: bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama 3": lambda: bpe(llama_like),
    "nfc": lambda: bpe(llama_like, normalizers.NFC()),
    "nfkc and stripped": lambda: unigram("always", normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()])),
    "metaspace first": lambda: unigram("first"),
    "metaspace never": lambda: unigram("never"),
    "word pieces": word_piece,
    "whole text": whole_text,
}


def tokenizer(name: str) -> PreTrainedTokenizerFast:
    out = PreTrainedTokenizerFast(tokenizer_object=TOKENIZERS[name]())
    out.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    out.add_tokens(
        [
            AddedToken("[MASK]", special=True, lstrip=True, rstrip=True, normalized=False),
            AddedToken("of", single_word=True, normalized=False),
            AddedToken("<tool>", normalized=True),
        ]
    )
    return out


def random_rows(number: int, seed: int) -> list[list[str]]:
    """Texts of words and special tokens, each with prefixes that end anywhere."""
    rng = random.Random(seed)
    rows = []
    for _ in range(number):
        joint = rng.choice(["", " "])
        text = joint.join(rng.choices([*WORDS, *SPECIAL, *SPECIAL], k=rng.randrange(1, 25)))
        rows.append([text, *(text[: rng.randrange(len(text) + 1)] for _ in range(4)), text])
    return rows


@pytest.mark.parametrize("name", TOKENIZERS)
def test_prefixes_have_the_ids_that_they_have_alone(name):
    alone = tokenizer(name)
    encoder = PrefixEncoder(alone)
    for seed in range(2):  # rests are remembered from one call to the next
        rows = random_rows(150, seed)
        for row, found in zip(rows, encoder.encode(rows), strict=True):
            for text, ids in zip(row, found, strict=True):
                assert ids.tolist() == alone(text, add_special_tokens=False)["input_ids"], repr(text)
                assert ids.dtype == np.int32
    assert encoder.remembered


def test_a_prefix_may_end_in_other_tokens_than_the_whole_has_there():
    """Two newlines before a word are two tokens; at the end of a text they are one."""
    one = tokenizer("gpt2")
    whole = "<|im_start|>\n\n\n\nseven"
    (found,) = PrefixEncoder(one).encode([[whole, whole[:-5]]])
    assert found[1].tolist() == one(whole[:-5])["input_ids"] != found[0][: len(found[1])].tolist()


def test_only_the_rest_behind_the_last_special_token_is_encoded(monkeypatch):
    calls = []

    def counted(tokenizer, texts):
        calls.append(list(texts))
        return encode_texts(tokenizer, texts)

    text = "<|im_start|>user\nwhy<|im_end|>\n<|im_start|>assistant\nseven<|im_end|>\n"
    before, upto = text.index("seven"), len(text) - 1
    monkeypatch.setattr("automodel_cli.data.chat.prefix_tokenizer.encode_texts", counted)
    encoder = PrefixEncoder(tokenizer("llama 3"))
    for _ in range(2):
        encoder.encode([[text, text[:before], text[:upto]]])
    assert list(itertools.chain(*calls)) == ["<|im_start|>assistant\n", "<|im_end|>"]


def test_special_tokens_that_are_text_cut_nothing():
    as_text = tokenizer("gpt2")
    as_text.split_special_tokens = as_text.backend_tokenizer.encode_special_tokens = True
    text = "<|im_start|>user\n\nwhy<|im_end|>"
    (found,) = PrefixEncoder(as_text).encode([[text, text[:18]]])
    assert len(found[0]) > 10 and found[1].tolist() == as_text(text[:18], add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize(
    ("configured", "megabytes", "cores", "workers"),
    [(None, 1, 8, 0), (None, 31, 8, 0), (None, 64, 8, 4), (None, 500, 8, 8), (None, 500, 1, 0), (3, 1, 8, 3)],
)
def test_as_many_workers_as_cores_where_the_data_is_worth_their_start(
    monkeypatch, configured, megabytes, cores, workers
):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    assert choose_workers(configured, megabytes << 20) == workers
