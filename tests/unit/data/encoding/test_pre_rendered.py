"""Rows that already hold BOS, EOS or a template's text are refused, and the fix reads them as the template wrote them.

The reference for the fix is the row as messages: its rendered text, read by the fix, must become the same tokens with
the same mask.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from tokenizers import processors

from automodel_cli.config.errors import DataError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.preparation.pipeline import prepare_data
from automodel_cli.data.preparation.prompts import prepare_prompts
from tests.errors import raises
from tests.unit.data import template_families
from tests.unit.data.helpers import NATIVE, WITH_BOS, chat_row, tiny_tokenizer, turn, write_jsonl

QUESTIONS = [f"hi {i}" for i in range(6)]


def rendered(tokenizer: Any, question: str) -> tuple[str, str, str]:
    """Prompt, answer, and the other answer, as the tokenizer's template writes them."""
    asked = [turn("user", question)]
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    answers = []
    for said in ("seven", "a text"):
        whole = tokenizer.apply_chat_template([*asked, turn("assistant", said)], tokenize=False)
        assert whole.startswith(prompt)
        answers.append(whole[len(prompt) :])
    return prompt, answers[0], answers[1]


def with_fix(config: DataConfig, error: DataError) -> DataConfig:
    """The config once the fix is typed."""
    assert error.fix is not None
    values = OmegaConf.from_dotlist([word.removeprefix("data.") for word in shlex.split(error.fix)])
    return replace(config, **{str(key): value for key, value in values.items()})


def tokens(config: DataConfig, tokenizer: Any, **options: Any) -> list[tuple[list[int], list[int]]]:
    data = prepare_data(config, tokenizer, seed=0, progress=lambda _: None, **options).train
    return [tuple(part.tolist() for part in data.tokens(row)[:2]) for row in range(len(data))]  # type: ignore[misc]


def with_bos() -> Any:
    return tiny_tokenizer(WITH_BOS, adds_bos=True)


def adds_bos_unlike_its_template() -> Any:
    return tiny_tokenizer(NATIVE, adds_bos=True)


@pytest.mark.parametrize("make", [tiny_tokenizer, with_bos, adds_bos_unlike_its_template])
def test_rendered_prompts_become_with_the_fix_what_their_messages_become(tmp_path: Path, make: Any) -> None:
    tokenizer = make()
    rows = [rendered(tokenizer, question) for question in QUESTIONS]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": p, "completion": c} for p, c, _ in rows])
    chats = write_jsonl(tmp_path / "chats.jsonl", [chat_row(question, "seven") for question in QUESTIONS])
    config = DataConfig(path=str(path), packing="none", seq_len=64, cache_dir=str(tmp_path / "cache"))
    with raises(DataError, "invalid_template") as refused:
        tokens(config, tokenizer)
    assert "data.chat_template=none" in str(refused.value.fix)
    fixed = tokens(with_fix(config, refused.value), tokenizer)
    assert fixed == tokens(replace(config, path=str(chats)), tokenizer)


@pytest.mark.parametrize("packing", ["none", "best_fit", "wrapped"])
@pytest.mark.parametrize("end", ["", "\n"])
def test_texts_with_bos_and_eos_get_none_of_them_twice(tmp_path: Path, packing: Any, end: str) -> None:
    tokenizer = with_bos()
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": f"<s>{question}<|im_end|>{end}"} for question in QUESTIONS])
    config = DataConfig(path=str(path), packing=packing, seq_len=16, cache_dir=str(tmp_path / "cache"))
    with raises(DataError, "invalid_template") as refused:
        tokens(config, tokenizer)
    assert refused.value.fix == "data.add_bos=false" + (" data.add_eos=false" if end else "")
    ids = [i for row, _ in tokens(with_fix(config, refused.value), tokenizer) for i in row]
    whole = [f"<s>{question}<|im_end|>{end}" for question in QUESTIONS]
    expected = sorted(i for text in whole for i in tokenizer(text, add_special_tokens=False)["input_ids"])
    if packing == "wrapped":  # repeats the tokens at its cuts
        assert ids.count(tokenizer.bos_token_id) == len(whole)
        ids = [*expected, *(Counter(expected) - Counter(ids)).elements()]
    assert sorted(i for i in ids if i != tokenizer.pad_token_id) == [i for i in expected if i != tokenizer.eos_token_id]
    assert ids.count(tokenizer.bos_token_id) == len(QUESTIONS)


def test_a_tokenizer_that_adds_eos_itself_adds_no_second_one(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    eos = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|im_end|>", special_tokens=[("<|im_end|>", eos)]
    )
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": f"{question}<|im_end|>"} for question in QUESTIONS])
    config = DataConfig(path=str(path), packing="none", seq_len=16, cache_dir=str(tmp_path / "cache"))
    with raises(DataError, "invalid_template") as refused:
        tokens(config, tokenizer)
    for ids, _ in tokens(with_fix(config, refused.value), tokenizer):
        assert ids.count(eos) == 1 and ids[-1] == eos


@pytest.mark.parametrize("make", [tiny_tokenizer, with_bos])
def test_rendered_pairs_become_with_the_fix_what_their_messages_become(tmp_path: Path, make: Any) -> None:
    tokenizer = make()
    rows = [rendered(tokenizer, question) for question in QUESTIONS]
    pairs = [{"prompt": p, "chosen": good, "rejected": bad} for p, good, bad in rows]
    plain = [{"prompt": question, "chosen": "seven", "rejected": "a text"} for question in QUESTIONS]
    config = DataConfig(packing="none", seq_len=64, cache_dir=str(tmp_path / "cache"), path="")
    config = replace(config, path=str(write_jsonl(tmp_path / "pairs.jsonl", pairs)))
    with raises(DataError, "invalid_template") as refused:
        tokens(config, tokenizer, preferences=True)
    expected = replace(config, path=str(write_jsonl(tmp_path / "plain.jsonl", plain)))
    fixed = tokens(with_fix(config, refused.value), tokenizer, preferences=True)
    assert fixed == tokens(expected, tokenizer, preferences=True)


@pytest.mark.parametrize("make", [tiny_tokenizer, with_bos, adds_bos_unlike_its_template])
def test_rendered_prompts_to_sample_from_become_what_their_questions_become(tmp_path: Path, make: Any) -> None:
    tokenizer = make()
    config = DataConfig(path=str(write_jsonl(tmp_path / "q.jsonl", [{"prompt": q} for q in QUESTIONS])))
    rows = [{"prompt": rendered(tokenizer, question)[0]} for question in QUESTIONS]
    ready = replace(config, path=str(write_jsonl(tmp_path / "rows.jsonl", rows)))

    def prompts(config: DataConfig) -> list[list[int]]:
        return [prompt.tokens for prompt in prepare_prompts(config, tokenizer, seed=0, max_tokens=64).train.prompts]

    with raises(DataError, "invalid_template") as refused:
        prompts(ready)
    assert prompts(with_fix(ready, refused.value)) == prompts(config)


@pytest.mark.parametrize("name", template_families.FAMILIES)
def test_rows_that_any_family_rendered_are_found(tmp_path: Path, name: str) -> None:
    tokenizer = template_families.FAMILIES[name].tokenizer()
    asked = [tokenizer.apply_chat_template([turn("user", q)], tokenize=False) for q in QUESTIONS]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": prompt, "completion": "seven"} for prompt in asked])
    config = DataConfig(path=str(path), packing="none", seq_len=512, cache_dir=str(tmp_path / "cache"))
    for reader in (tokenizer, tiny_tokenizer()):  # by its own template, and by another one's
        with raises(DataError, "invalid_template") as refused:
            tokens(config, reader)
        assert "data.chat_template=none" in str(refused.value.fix)


@pytest.mark.parametrize(
    "row",
    [
        chat_row("what does <|im_start|>user mean?", "it opens a turn"),
        {"prompt": "what is <|im_end|>", "completion": "the end of a turn"},
        {"text": "the token <s> begins a text"},
    ],
)
def test_questions_about_control_tokens_are_no_rendered_rows(tmp_path: Path, row: dict[str, Any]) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    config = DataConfig(path=str(path), packing="none", seq_len=64, cache_dir=str(tmp_path / "cache"))
    assert len(tokens(config, with_bos())) == 1


def test_some_rendered_rows_among_others_are_text_as_before(tmp_path: Path) -> None:
    rows = [chat_row("hello", "seven")] * 5 + [chat_row("<|im_start|>system\nobey", "no")]
    config = DataConfig(path=str(write_jsonl(tmp_path / "rows.jsonl", rows)), cache_dir=str(tmp_path / "cache"))
    assert tokens(config, tiny_tokenizer())
    config = replace(config, path=str(write_jsonl(tmp_path / "all.jsonl", rows[-1:] * 3)))
    with raises(DataError, "invalid_template") as refused:
        tokens(config, tiny_tokenizer())
    assert "none" not in str(refused.value.fix)  # messages cannot be read without a template
    assert tokens(replace(config, special_tokens_policy="as_text"), tiny_tokenizer())


def test_answers_that_bring_the_stop_token_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt": question, "completion": "seven<|im_end|>"} for question in QUESTIONS]
    config = DataConfig(path=str(write_jsonl(tmp_path / "rows.jsonl", rows)), cache_dir=str(tmp_path / "cache"))
    with raises(DataError, "invalid_template") as refused:
        tokens(config, tiny_tokenizer())
    assert "'<|im_end|>'" in str(refused.value.fix)
