"""Accuracy and answers on held-out questions, before and after training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Answer:
    """One question, the model's response without special tokens, the expected answer, and whether they are equal.
    `pictures`: small copies of the pictures of the question, as `data:` URLs."""

    question: str
    completion: str
    answer: str
    correct: bool
    kind: str
    pictures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Accuracy:
    """Every answer of one measurement, in the order of the rows. `is_sample`: too few answers for a result."""

    answers: tuple[Answer, ...]
    is_sample: bool = False

    @property
    def num_correct(self) -> int:
        return sum(answer.correct for answer in self.answers)

    @property
    def share(self) -> float:
        """Of all questions, in 0..1."""
        return self.num_correct / len(self.answers)

    def by_kind(self) -> dict[str, float]:
        """The share within each kind of question, kinds in alphabetical order."""
        marks: dict[str, list[bool]] = {}
        for answer in sorted(self.answers, key=lambda answer: answer.kind):
            marks.setdefault(answer.kind, []).append(answer.correct)
        return {kind: sum(correct) / len(correct) for kind, correct in marks.items()}

    def examples(self, count: int) -> list[Answer]:
        """Return `count` example answers: one of each kind first, in order. Wrong answers are included."""
        firsts: dict[str, Answer] = {}
        for answer in self.answers:
            firsts.setdefault(answer.kind, answer)
        others = [answer for answer in self.answers if firsts[answer.kind] is not answer]
        return [*firsts.values(), *others][:count]


def before_and_after(accuracy: Mapping[str, Accuracy], count: int) -> list[tuple[Answer, Answer | None]]:
    """Return questions with the answers after and, if available, before training.

    Args:
        accuracy: results by `before` and `after`. Without `after`, nothing is returned.
    """
    if "after" not in accuracy:
        return []
    before = accuracy["before"].answers if "before" in accuracy else ()
    earlier = {(answer.question, answer.pictures): answer for answer in before}
    return [(answer, earlier.get((answer.question, answer.pictures))) for answer in accuracy["after"].examples(count)]
