"""The chat tasks: answers against an independent reading of the question, held-out problems, repeatability."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

import pytest

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.preparation.pipeline import prepare_data
from automodel_cli.data.synthetic.chat_tasks import KINDS, ChatTasks
from automodel_cli.models.tokenizer import ByteTokenizer
from tests.errors import raises

PINNED_QUESTIONS = ["Say QPRFO again.", "Write the digits of 00572 in order.", "What is HENVD in reverse?"]
PINNED_KEY = "9131d33ff25cb388e72b0ab01cf763e4ab5e2ccc9e351f38bd0abfbd024276ae"


def solve(question: str) -> str:
    """Answer a question from its text alone, the way a person would read it."""
    numbers = [int(n) for n in re.findall(r"\d+", question)]
    capitals = re.findall(r"\b[A-Z]{2,}\b", question)
    text = question.lower()
    if "digits" in text:
        return "".join(sorted(re.search(r"\d+", question).group()))
    if "larger" in text:
        return str(max(numbers))
    if any(word in text for word in (" - ", "subtract", "minus", "away from")):
        return str(max(numbers) - min(numbers))
    if len(numbers) == 2:
        return str(sum(numbers))
    (word,) = capitals
    if "how many" in text or "count" in text or "number of" in text:
        return str(len(word))
    if any(words in text for words in ("reverse", "backwards", "last letter to the first")):
        return "".join(reversed(word))
    if "last letter" in text or "ends in" in text:
        return word[-1]
    return word


def problem(row):
    """The operands as they stand in the question, in a fixed order, with the kind."""
    question = row["messages"][0]["content"]
    return row["kind"], tuple(sorted(re.findall(r"\d+|\b[A-Z]{2,}\b", question)))


@pytest.mark.parametrize("split", ["train", "validation"])
def test_answers_are_right(split):
    for row in ChatTasks(num_train=2000, num_validation=400, max_addend=99, seed=3).rows(split):
        user, assistant = row["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        assert assistant["content"] == row["answer"] == solve(user["content"]), user


def test_every_kind_and_phrase_occurs():
    rows = list(ChatTasks(num_train=4000).rows("train"))
    assert {row["kind"] for row in rows} == set(KINDS)
    for kind in KINDS:
        phrases = {re.sub(r"\d+|\b[A-Z]{2,}\b", "#", r["messages"][0]["content"]) for r in rows if r["kind"] == kind}
        assert len(phrases) >= 3, (kind, phrases)


def test_held_out_problems_are_never_trained_on_whatever_the_seed():
    held_out = {problem(row) for seed in (0, 1) for row in ChatTasks(seed=seed).rows("validation")}
    trained = {problem(row) for seed in (0, 5) for row in ChatTasks(num_train=20_000, seed=seed).rows("train")}
    assert len(held_out) > 400
    assert not held_out & trained


def test_a_sum_is_held_out_in_both_orders():
    node = ChatTasks(kinds={"add": 1.0}, num_train=5000, num_validation=50, max_number=30, max_addend=30)
    asked = {tuple(re.findall(r"\d+", row["messages"][0]["content"])) for row in node.rows("validation")}
    trained = {tuple(re.findall(r"\d+", row["messages"][0]["content"])) for row in node.rows("train")}
    assert not {(b, a) for a, b in asked} & trained
    assert any(int(a) > int(b) for a, b in trained) and any(int(a) < int(b) for a, b in trained)


def test_validation_questions_are_distinct_problems():
    rows = list(ChatTasks(num_validation=300).rows("validation"))
    assert len({problem(row) for row in rows}) == len(rows) == 300


def test_the_same_node_gives_the_same_rows_and_another_seed_others():
    first, again, other = (list(ChatTasks(num_train=50, seed=s).rows("train")) for s in (1, 1, 2))
    assert first == again != other
    assert len(first) == 50


def test_rows_and_key_are_pinned():
    """A change of the rows must change the version in the cache key; this fails until both are looked at."""
    node = ChatTasks(num_train=3)
    assert [row["messages"][0]["content"] for row in node.rows("train")] == PINNED_QUESTIONS
    assert node.cache_key() == PINNED_KEY


def test_the_key_names_every_field():
    keys = [
        ChatTasks(**change).cache_key()
        for change in (
            {},
            {"kinds": {"add": 1.0}},
            {"num_train": 7},
            {"num_validation": 7},
            {"max_number": 50},
            {"max_addend": 5},
            {"max_length": 3},
            {"context": [{"role": "system", "content": "Be brief."}]},
            {"seed": 1},
        )
    ]
    assert len(set(keys)) == len(keys)


def test_shares_are_followed():
    counts = Counter(
        r["kind"] for r in ChatTasks(kinds={"add": 3.0, "repeat": 1.0, "larger": 0.0}, num_train=4000).rows("train")
    )
    assert set(counts) == {"add", "repeat"}
    assert counts["add"] / 4000 == pytest.approx(0.75, abs=0.03)


@pytest.mark.parametrize(
    ("completion", "right"),
    [("42", True), (" 42\n", True), ("42.", False), ("142", False), ("4 2", False), ("042", False), ("", False)],
)
def test_an_answer_is_exact(completion, right):
    assert ChatTasks().check_answer(completion, "42") is right


@pytest.mark.parametrize(
    ("fields", "code", "key"),
    [
        ({"kinds": {"multiply": 1.0}}, "invalid_choice", "kinds.multiply"),
        ({"kinds": {"add": -1.0}}, "out_of_range", "kinds.add"),
        ({"kinds": {"add": 0.0}}, "empty_value", "kinds"),
        ({"kinds": {}}, "empty_value", "kinds"),
        ({"num_train": 0}, "out_of_range", "num_train"),
        ({"max_length": 1}, "out_of_range", "max_length"),
        ({"max_number": 3}, "out_of_range", "max_number"),
    ],
)
def test_invalid_values_are_rejected(fields, code, key):
    with raises(ConfigError, code, keys=(key,), values=(key,)):
        ChatTasks(**fields)


def test_too_few_held_out_problems_are_said_with_their_number():
    node = ChatTasks(kinds={"add": 1.0}, max_number=9, num_validation=100)
    with raises(DataError, "not_enough_rows", keys=("num_validation",), values=("num_validation=100",)) as error:
        list(node.rows("validation"))
    count = int(error.value.fix.split("=")[1])
    assert len(list(ChatTasks(kinds={"add": 1.0}, max_number=9, num_validation=count).rows("validation"))) == count


def test_importing_the_module_imports_no_torch():
    code = "import sys, automodel_cli.data.synthetic.chat_tasks as t; t.ChatTasks(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_messages_of_the_context_stand_before_each_question_and_are_not_trained():
    shown = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "What is 1 + 1?"}]
    shown.append({"role": "assistant", "content": "2"})
    plain, told = (list(ChatTasks(num_train=20, context=c).rows("train")) for c in ([], shown))
    for alone, row in zip(plain, told, strict=True):
        *before, question, answer = row["messages"]
        assert [{key: m[key] for key in ("role", "content")} for m in before] == shown
        assert [question, answer] == alone["messages"] and row["answer"] == alone["answer"]
    config = DataConfig(generator=ChatTasks(num_train=20, num_validation=1, context=shown), seq_len=256)
    tokenizer = ByteTokenizer().build()
    train = prepare_data(config, tokenizer, seed=0).train
    trained = ""
    for row in range(len(train)):
        ids, mask, _ = train.tokens(row)
        trained += tokenizer.decode(ids[1:][mask[:-1].astype(bool)])  # the mask is of what is predicted from
    assert sorted(trained.split("<|end|>")[:-1]) == sorted(row["answer"] for row in told)


@pytest.mark.parametrize("message", [{"role": "bot", "content": "x"}, {"role": "user"}, {"role": "user", "text": "x"}])
def test_a_message_of_the_context_that_is_none_is_refused(message):
    with raises(ConfigError, "invalid_value", keys=("context",), values=("context[0]",)):
        ChatTasks(context=[message])
