"""Sample questions and answers of a task as terminal lines. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from automodel_cli.config.plain_text import visible
from automodel_cli.evaluation.scores import TaskScores

_SHOWN = 3
"""Questions of a task."""
_WIDTH = 90
"""Characters of a text."""


def example_lines(name: str, outcomes: Mapping[str, TaskScores]) -> Iterator[str]:
    """Yield a few questions of the task `name`, with the expected answer and the response of each model (by its label).

    Questions whose mark differs between the models come first.
    """
    first = next(iter(outcomes.values()))
    num_questions = min(len(outcome.items) for outcome in outcomes.values())
    chosen = _chosen([_marks(outcome)[:num_questions] for outcome in outcomes.values()])
    if not chosen:
        return
    yield f"{name}: {len(chosen)} of {num_questions} questions"
    width = max(len("question"), len("expected"), *map(len, outcomes))
    for number in chosen:
        item = first.items[number]
        yield f"  {'question':<{width}}  {short(item['question'])}"
        if item.get("answer") is not None:
            yield f"  {'expected':<{width}}  {short(item['answer'])}"
        for label, outcome in outcomes.items():
            answer = short(_answer(outcome.items[number]))
            yield f"  {visible(label):<{width}}  {_marks(outcome)[number]}  {answer}".rstrip()
        yield ""


def short(value: object) -> str:
    """Return a text on one line, bounded, with its control characters written out."""
    text = visible(str(value)[: 2 * _WIDTH]).replace("\n", "\\n").replace("\t", "\\t")
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


def _chosen(marks: Sequence[Sequence[str]]) -> list[int]:
    places = range(min(map(len, marks)))
    differ = [number for number in places if len({of[number] for of in marks}) > 1]
    same = [number for number in places if number not in set(differ)]
    return sorted([*differ, *same][:_SHOWN])


def _marks(outcome: TaskScores) -> list[str]:
    """Format the first measure of each question. Several samples give a fraction."""
    return [_mark(value) for value in next(iter(outcome.measures.values()), [])]


def _mark(value: float | None) -> str:
    if value is None:
        return "not judged"
    return {0.0: "wrong", 1.0: "right"}.get(value, f"{value:.3g}")


def _answer(item: Mapping[str, Any]) -> str:
    """Return the model's choice, or the first of its responses."""
    if "chosen" in item:
        return str(item["chosen"])
    responses = item.get("responses") or [""]
    return str(responses[0]) if str(responses[0]).strip() else "(empty)"
