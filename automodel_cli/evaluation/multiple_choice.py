"""Multiple-choice tasks: score every choice by its log-prob as continuation of the question."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from automodel_cli.config.errors import DataError
from automodel_cli.data.formats.unused_columns import PICTURES
from automodel_cli.evaluation.scores import TaskScores
from automodel_cli.run.checks.token_ids import check_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from automodel_cli.evaluation.eval_model import EvalModel
    from automodel_cli.evaluation.settings import MultipleChoiceSettings

_AT_ONCE = 16


@dataclass(frozen=True)
class _Question:
    text: str
    prefix: list[int]
    choices: list[str]
    continuations: list[list[int]]
    answer: int


def score_choices(task: MultipleChoiceSettings, candidate: EvalModel) -> TaskScores:
    """Measures `accuracy`. Collective."""
    questions = read_choice_questions(task, candidate)
    pairs = [(q, c) for q, question in enumerate(questions) for c in range(len(question.choices))]
    local_indices = candidate.share(len(pairs))
    longest = -(-len(pairs) // candidate.mesh.dp_size)
    padded = [
        *local_indices,
        *([0] * (longest - len(local_indices))),
    ]  # forward passes are collective: equal counts on every rank
    scores: dict[int, float] = {}
    for begin in range(0, longest, _AT_ONCE):
        numbers = padded[begin : begin + _AT_ONCE]
        parts = [(questions[pairs[n][0]].prefix, questions[pairs[n][0]].continuations[pairs[n][1]]) for n in numbers]
        found = candidate.model.score([prefix + continuation for prefix, continuation in parts])
        for number, (_, continuation), logprobs in zip(numbers, parts, found, strict=True):
            scores[number] = logprobs[-len(continuation) :].sum().item()
    everyone = dict(zip(pairs, candidate.gathered(scores), strict=True))
    right: list[float | None] = []
    items = []
    for q, question in enumerate(questions):
        values = [everyone[q, c] / _size(task, question, c) for c in range(len(question.choices))]
        chosen = max(range(len(values)), key=values.__getitem__)
        right.append(float(chosen == question.answer))
        item = {"chosen": question.choices[chosen], "answer": question.choices[question.answer]}
        items.append({"question": question.text, **item, "scores": values})
    return TaskScores({"accuracy": right}, items)


def read_choice_questions(task: MultipleChoiceSettings, candidate: EvalModel) -> list[_Question]:
    """Return the questions of the task, read once. Raises DataError with the invalid line."""
    return candidate.once(task, lambda: _questions(task, candidate))


def _questions(task: MultipleChoiceSettings, candidate: EvalModel) -> list[_Question]:
    lines = _lines(task)
    questions = [_question(line, where, candidate.tokenizer) for where, line in lines]
    tokens = [
        (where, [*question.prefix, *(token for ids in question.continuations for token in ids)])
        for (where, _), question in zip(lines, questions, strict=True)
    ]
    check_tokens(tokens, "task's", candidate.tokenizer, candidate.recipe.model)
    return questions


def _size(task: MultipleChoiceSettings, question: _Question, choice: int) -> int:
    if task.normalize == "tokens":
        return len(question.continuations[choice])
    return max(1, len(question.choices[choice])) if task.normalize == "characters" else 1


def _lines(task: MultipleChoiceSettings) -> list[tuple[str, Any]]:
    try:
        lines = Path(task.path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(
            f"{task.path} cannot be read: {error.strerror}",
            code="missing_file" if isinstance(error, FileNotFoundError) else "unreadable_file",
            keys=("path",),
        ) from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append((f"{task.path}:{number}", json.loads(line)))
        except ValueError:
            raise DataError(f"{task.path}:{number} is not valid JSON", code="damaged_file") from None
    if not found:
        raise DataError(f"{task.path} contains no questions", code="not_enough_rows", keys=("path",))
    return found[: task.limit]


def _question(row: Any, where: str, tokenizer: PreTrainedTokenizerBase) -> _Question:
    """Raises DataError with the line of a row that is no question with choices."""
    match row:
        case {"choices": [_, _, *_] as choices} if all(isinstance(choice, str) and choice for choice in choices):
            pass
        case _:
            raise DataError(f"{where}: choices must be a list of at least two texts", code="bad_rows")
    for column in PICTURES:
        if row.get(column):
            raise DataError(
                f"{where}: the column {column!r} has pictures, but choices are compared as text",
                code="bad_rows",
                keys=("path",),
                fix="a task of the class Generation, which reads pictures",
            )
    messages = row.get("messages") or [{"role": "user", "content": row.get("question")}]
    if not isinstance(messages[-1].get("content"), str):
        raise DataError(f"{where}: question must be a text, or messages a list of messages", code="bad_rows")
    answer = row.get("answer")
    number = choices.index(answer) if answer in choices else answer
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(choices):
        raise DataError(
            f"{where}: answer={answer!r} must be a number from 0 to {len(choices) - 1}, or the text of a choice",
            code="bad_rows",
        )
    if tokenizer.chat_template:
        encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        prefix = list(encoded["input_ids"])
    else:
        prefix = tokenizer(messages[-1]["content"])["input_ids"]
    continuations = [tokenizer(choice, add_special_tokens=False)["input_ids"] for choice in choices]
    return _Question(messages[-1]["content"], prefix, choices, continuations, number)
