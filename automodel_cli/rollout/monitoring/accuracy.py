"""Accuracy of greedy completions on questions with exact answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from automodel_cli.config.errors import DataError
from automodel_cli.rollout.engines.base import Engine
from automodel_cli.rollout.types import SamplingParams
from automodel_cli.run.heldout_accuracy import Accuracy, Answer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def measure_accuracy(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterable[dict[str, Any]],
    check_answer: Callable[[str, str], bool],
    *,
    max_new_tokens: int = 32,
) -> Accuracy:
    """Generate a greedy reply to each row and return the accuracy.

    A row has `messages` (the last one is the answer), `answer` and `kind`. A reply that does not end within
    `max_new_tokens` is wrong. Raises DataError if there are no rows.
    """
    rows = list(rows)
    if not rows:
        raise DataError("no questions to measure accuracy on", code="not_enough_rows")
    prompts = [_prompt(tokenizer, row["messages"][:-1]) for row in rows]
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0))
    answers = []
    for row, completion in zip(rows, completions, strict=True):
        text = str(tokenizer.decode(completion.tokens, skip_special_tokens=True))
        correct = completion.finish_reason == "stop" and check_answer(text, row["answer"])
        answers.append(Answer(row["messages"][-2]["content"], text, row["answer"], correct, row.get("kind", "")))
    return Accuracy(tuple(answers))


def _prompt(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> list[int]:
    encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])
