"""Scores of one task on one model, and what may be said of them: means, intervals, paired comparisons. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

REWARD = "reward"
"""The measure that is no share."""
_SEED = 0
_CHUNK = 4_000_000


@dataclass(frozen=True)
class Outcome:
    """Of one task: for each measure (`accuracy`, `pass@4`, ...) one value a question, in the order of the questions,
    None where a judge failed on it; and what was asked and said, an entry a question."""

    measures: dict[str, list[float | None]]
    items: list[dict[str, Any]] = field(default_factory=list)

    def says_nothing_more(self, measure: str) -> bool:
        """Whether it is the reward where that is 0 or 1, so that its mean is the share of right answers."""
        shares = self.measures.get("accuracy", self.measures.get("pass@1"))
        return measure == REWARD and shares == self.measures[measure]

    def line(self, name: str) -> str:
        """`NAME: accuracy 43.8% of 16 questions`."""
        words = (f"{m} {text_of(m)(mean)}" for m, mean in self.means.items() if not self.says_nothing_more(m))
        return f"{name}: {', '.join(words)} of {questions(next(iter(self.measures.values())))}"

    @property
    def means(self) -> dict[str, float]:
        """Of each measure over the questions that were judged; NaN where none was."""
        known = {measure: known_of(values) for measure, values in self.measures.items()}
        return {measure: sum(values) / len(values) if values else math.nan for measure, values in known.items()}


def known_of(values: Sequence[float | None]) -> list[float]:
    """Those of the questions that were judged."""
    return [value for value in values if value is not None]


def questions(values: Sequence[float | None]) -> str:
    """`16 questions`, or `14 questions (2 more could not be judged)`."""
    known = len(known_of(values))
    return f"{known} questions" + (f" ({len(values) - known} more could not be judged)" if known < len(values) else "")


def text_of(measure: str, *, signed: bool = False) -> Callable[[float], str]:
    """How a mean of this measure is written: a reward as it is, all else as a share, and what nothing is known of."""
    sign = "+" if signed else ""
    as_known: Callable[[float], str] = (
        (lambda value: f"{value:{sign}.3f}") if measure == REWARD else (lambda value: f"{100 * value:{sign}.1f}%")
    )
    return lambda value: "n/a" if math.isnan(value) else as_known(value)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that one of k responses drawn without replacement from `num_samples` is right: 1 - C(n-c, k) / C(n, k)."""
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def interval(values: Sequence[float], num_resamples: int) -> tuple[float, float]:
    """95% percentile bootstrap of the mean, over questions; NaN without any."""
    if not len(values):
        return math.nan, math.nan
    means = _resampled(np.asarray(values, np.float64), num_resamples)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def paired_difference(
    values: Sequence[float | None], others: Sequence[float | None], num_resamples: int
) -> tuple[float, tuple[float, float]]:
    """Mean of `values - others` over the same questions, and its 95% bootstrap: questions are drawn, so that what makes
    one hard for both does not widen it. Those that were not judged for both are left out; NaN where all were."""
    pairs = [(a, b) for a, b in zip(values, others, strict=True) if a is not None and b is not None]
    differences = np.asarray([a - b for a, b in pairs], np.float64)
    return float(differences.mean()) if pairs else math.nan, interval(differences.tolist(), num_resamples)


def _resampled(values: np.ndarray, num_resamples: int) -> np.ndarray:
    generator = np.random.default_rng(_SEED)
    per_chunk = max(1, _CHUNK // len(values))
    means: list[np.ndarray] = []
    for begin in range(0, num_resamples, per_chunk):
        size = min(per_chunk, num_resamples - begin)
        means.append(values[generator.integers(0, len(values), (size, len(values)))].mean(1))
    return np.concatenate(means)
