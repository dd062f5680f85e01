"""Coverage of evaluation texts against sets of n-grams of words."""

from __future__ import annotations

import random

import numpy as np
import pytest

from automodel_cli.config.errors import DataError
from automodel_cli.data.quality.overlap import build_index
from automodel_cli.data.quality.words import WordHasher
from automodel_cli.data.row_errors import RowError, SourceRow
from tests.errors import raises


def index_of(*sets: list[dict], n: int = 13):
    named = [
        (f"e{k}", ["e.jsonl"], [SourceRow(0, i, row) for i, row in enumerate(rows, 1)]) for k, rows in enumerate(sets)
    ]
    return build_index(named, n)


def grams(words: list[str], n: int) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def test_coverage_is_the_share_of_common_ngrams() -> None:
    chosen = random.Random(0)
    vocabulary = [f"w{n}" for n in range(40)]
    units = [[chosen.choice(vocabulary) for _ in range(chosen.choice((8, 12, 13, 40)))] for _ in range(60)]
    index = index_of([{"question": " ".join(words)} for words in units])
    hasher = WordHasher()
    for _ in range(20):
        row: list[str] = []
        for _ in range(4):
            source = chosen.choice(units)
            begin = chosen.randrange(len(source))
            row += source[begin : begin + 30]
        found, coverage = index.covered(hasher(" ".join(row)))
        got = dict(zip(found.tolist(), coverage.tolist(), strict=True))
        for number, words in enumerate(units):
            n = 13 if len(words) >= 13 else 8
            want = len(grams(words, n) & grams(row, n)) / len(grams(words, n))
            assert got.get(number, 0.0) == pytest.approx(want)


def test_words_ignore_case_punctuation_and_width() -> None:
    hasher = WordHasher()
    np.testing.assert_array_equal(hasher("Ｈello, (World)!\n"), hasher("hello world"))
    assert len(hasher("天地玄黄 abc")) == 5  # characters without spaces are words
    assert len(hasher("สวัสดี")) > 1


def test_texts_of_rows_are_compared_one_by_one() -> None:
    question, answer = (" ".join(f"{letter}{n}" for n in range(20)) for letter in "qa")
    rows = [
        {"id": 7, "messages": [{"role": "system", "content": "s " * 20}, {"role": "user", "content": question}]},
        {"choices": [answer, "no"], "answer": 0},
        {"question": "too short"},
    ]
    index = index_of(rows)
    assert (index.rows_U.tolist(), index.sets[0].num_too_short) == ([0, 1], 1)
    found, coverage = index.covered(WordHasher()(f"Now {question}"))
    assert (found.tolist(), coverage.tolist(), index.origin(0)) == ([0], [1.0], "e.jsonl:1")


def test_instructions_of_many_rows_are_not_compared() -> None:
    instruction = " ".join(f"i{n}" for n in range(20))
    own = [" ".join(f"r{row}x{n}" for n in range(20)) for row in range(11)]
    index = index_of([{"q": f"{instruction} {text}"} for text in own])
    assert not len(index.covered(WordHasher()(instruction))[0])
    assert index.covered(WordHasher()(own[3]))[0].tolist() == [3]
    few = index_of([{"q": f"{instruction} {text}"} for text in own[:10]])
    assert len(few.covered(WordHasher()(instruction))[0]) == 10


def test_evaluations_without_comparable_rows_are_rejected() -> None:
    with raises(DataError, "not_enough_rows", keys=("--against",), values=("e0",)):
        index_of([{"q": "four words are short"}])
    with raises(DataError, "bad_rows", values=("e.jsonl:3",)):
        build_index([("e", ["e.jsonl"], [SourceRow(0, 3, RowError("not_json", "no"))])], 13)
