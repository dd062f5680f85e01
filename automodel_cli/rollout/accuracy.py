"""Share of questions that a model answers exactly, by an engine's greedy completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from automodel_cli.config.errors import DataError
from automodel_cli.rollout.engine import Engine, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Sample:
    """One question, what the model said (without special tokens), what was right, and whether that is the same."""

    question: str
    completion: str
    answer: str
    correct: bool
    kind: str


@dataclass(frozen=True)
class Accuracy:
    """Every answer of one measurement, in the order of the rows."""

    samples: tuple[Sample, ...]

    @property
    def num_correct(self) -> int:
        return sum(sample.correct for sample in self.samples)

    @property
    def share(self) -> float:
        """Of all questions, in 0..1."""
        return self.num_correct / len(self.samples)

    def by_kind(self) -> dict[str, float]:
        """The share within each kind of question, kinds in alphabetical order."""
        marks: dict[str, list[bool]] = {}
        for sample in sorted(self.samples, key=lambda sample: sample.kind):
            marks.setdefault(sample.kind, []).append(sample.correct)
        return {kind: sum(correct) / len(correct) for kind, correct in marks.items()}

    def examples(self, count: int) -> list[Sample]:
        """`count` samples to show: one of each kind first, in the order of the rows; wrong answers are not hidden."""
        firsts: dict[str, Sample] = {}
        for sample in self.samples:
            firsts.setdefault(sample.kind, sample)
        others = [sample for sample in self.samples if firsts[sample.kind] is not sample]
        return [*firsts.values(), *others][:count]


def measure_accuracy(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    rows: Iterable[dict[str, Any]],
    check_answer: Callable[[str, str], bool],
    *,
    max_new_tokens: int = 32,
) -> Accuracy:
    """Ask every row greedily and check the reply. A row has `messages` (the last one is the answer), `answer`, `kind`.

    A reply that does not end by itself within `max_new_tokens` is wrong. Raises DataError when there is no row.
    """
    rows = list(rows)
    if not rows:
        raise DataError("no question to measure accuracy on")
    prompts = [_prompt(tokenizer, row["messages"][:-1]) for row in rows]
    completions = engine.generate(prompts, SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0))
    samples = []
    for row, completion in zip(rows, completions, strict=True):
        text = str(tokenizer.decode(completion.tokens, skip_special_tokens=True))
        correct = completion.finish_reason == "stop" and check_answer(text, row["answer"])
        samples.append(Sample(row["messages"][-2]["content"], text, row["answer"], correct, row.get("kind", "")))
    return Accuracy(tuple(samples))


def _prompt(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> list[int]:
    encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])
