"""Scores of a task: means, confidence intervals and paired differences. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

REWARD = "reward"
"""The measure that is no share."""
_SEED = 0
_Z = 1.959963984540054
"""The 97.5% quantile of the standard normal distribution."""
_CHUNK = 4_000_000


@dataclass(frozen=True)
class TaskScores:
    """Results of one task. Each measure (`accuracy`, `pass@4`, ...) has one value per question in order, None after a
    failed reward. `questions` holds question and response of each entry."""

    measures: dict[str, list[float | None]]
    items: list[dict[str, Any]] = field(default_factory=list)

    def says_nothing_more(self, measure: str) -> bool:
        """Whether it is a reward of 0 or 1, so that its mean is the accuracy."""
        shares = self.measures.get("accuracy", self.measures.get("pass@1"))
        return measure == REWARD and shares == self.measures[measure]

    def line(self, name: str) -> str:
        """`NAME: accuracy 43.8% of 16 questions`."""
        words = (f"{m} {text_of(m)(mean)}" for m, mean in self.means.items() if not self.says_nothing_more(m))
        return f"{name}: {', '.join(words)} of {num_questions_text(next(iter(self.measures.values())))}"

    @property
    def means(self) -> dict[str, float]:
        """Mean of each measure over the scored questions, or NaN without any."""
        known = {measure: known_of(values) for measure, values in self.measures.items()}
        return {measure: sum(values) / len(values) if values else math.nan for measure, values in known.items()}


def known_of(values: Sequence[float | None]) -> list[float]:
    """Return the values of the questions that were scored."""
    return [value for value in values if value is not None]


def num_questions_text(values: Sequence[float | None]) -> str:
    """Return `16 questions`, or `14 questions (2 more could not be scored)`."""
    known = len(known_of(values))
    return f"{known} questions" + (f" ({len(values) - known} more could not be judged)" if known < len(values) else "")


def text_of(measure: str, *, signed: bool = False) -> Callable[[float], str]:
    """Format the mean of a measure: rewards and unknown measures as numbers, others as fractions."""
    sign = "+" if signed else ""
    as_known: Callable[[float], str] = (
        (lambda value: f"{value:{sign}.3f}") if measure == REWARD else (lambda value: f"{100 * value:{sign}.1f}%")
    )
    return lambda value: "n/a" if math.isnan(value) else as_known(value)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return the probability that one of k out of `num_samples` responses is correct: 1 - C(n-c, k) / C(n, k)."""
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def interval(values: Sequence[float], num_resamples: int) -> tuple[float, float]:
    """Return the 95% interval of the mean over questions, or NaN without questions.

    Binary values use Wilson's score interval, because a bootstrap has no width at 0% and 100%. Other values use a
    percentile bootstrap.
    """
    if not len(values):
        return math.nan, math.nan
    if _are_binary(values):
        return wilson(int(sum(values)), len(values))
    return _bootstrap(values, num_resamples)


def _bootstrap(values: Sequence[float], num_resamples: int) -> tuple[float, float]:
    means = _resampled(np.asarray(values, np.float64), num_resamples)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def wilson(num_right: int, num_questions: int) -> tuple[float, float]:
    """95% score interval of a proportion (Wilson 1927, doi:10.1080/01621459.1927.10502953)."""
    n, share = num_questions, num_right / num_questions
    middle = share + _Z * _Z / (2 * n)
    half = _Z * math.sqrt(share * (1 - share) / n + _Z * _Z / (4 * n * n))
    return max(0.0, (middle - half) / (1 + _Z * _Z / n)), min(1.0, (middle + half) / (1 + _Z * _Z / n))


def _are_binary(values: Sequence[float]) -> bool:
    return all(value in (0, 1) for value in values)


def _paired_score(values: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """95% interval of the difference of two proportions on the same questions.

    Two Wilson intervals, joined with the correlation of the answers (Newcombe 1998, Statistics in Medicine 17:2635,
    method 10).
    """
    n = len(values)
    both = sum(a == b == 1 for a, b in zip(values, others, strict=True))
    num, other = int(sum(values)), int(sum(others))
    spread = num * (n - num) * other * (n - other)
    covariance: float = n * both - num * other
    if covariance > 0:
        covariance = max(0.0, covariance - n / 2)
    phi = covariance / math.sqrt(spread) if spread else 0.0
    (low, high), (other_low, other_high) = wilson(num, n), wilson(other, n)
    share, other_share = num / n, other / n

    def reach(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))

    difference = share - other_share
    return (
        difference - reach(share - low, other_high - other_share),
        difference + reach(high - share, other_share - other_low),
    )


def paired_difference(
    values: Sequence[float | None], others: Sequence[float | None], num_resamples: int
) -> tuple[float, tuple[float, float]]:
    """Return the mean of `values - others` over the same questions, and its 95% interval.

    Binary answers use a score interval, others a paired bootstrap over questions. Questions that lack a score are
    excluded. NaN if all are.
    """
    pairs = [(a, b) for a, b in zip(values, others, strict=True) if a is not None and b is not None]
    differences = np.asarray([a - b for a, b in pairs], np.float64)
    if not pairs:
        return math.nan, (math.nan, math.nan)
    first, second = zip(*pairs, strict=True)
    if _are_binary([*first, *second]):
        return float(differences.mean()), _paired_score(first, second)
    return float(differences.mean()), _bootstrap(differences.tolist(), num_resamples)


def _resampled(values: np.ndarray, num_resamples: int) -> np.ndarray:
    generator = np.random.default_rng(_SEED)
    per_chunk = max(1, _CHUNK // len(values))
    means: list[np.ndarray] = []
    for begin in range(0, num_resamples, per_chunk):
        size = min(per_chunk, num_resamples - begin)
        means.append(values[generator.integers(0, len(values), (size, len(values)))].mean(1))
    return np.concatenate(means)
