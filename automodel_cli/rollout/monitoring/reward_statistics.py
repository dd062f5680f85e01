"""What samples are worth on average, and how often they are right, without those whose rewards do not count."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from automodel_cli.rollout.types import Sample


def is_right(sample: Sample) -> bool:
    """Every reward that should judge it did, and gave at least 1; one that nobody judged is not."""
    return bool(sample.score.parts) and not sample.score.errors and min(sample.score.parts.values()) >= 1


def is_wrong(sample: Sample) -> bool:
    """Every reward that should judge it did, and gave at most 0."""
    return bool(sample.score.parts) and not sample.score.errors and max(sample.score.parts.values()) <= 0


def by_group(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples of one prompt together."""
    found: dict[int, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.place, []).append(sample)
    return list(found.values())


def counted(samples: Sequence[Sample]) -> list[Sample]:
    """Without those that an error's `on_error: skip` leaves out: their totals say nothing."""
    return [sample for sample in samples if sample.score.valid]


def judged(samples: Sequence[Sample]) -> list[Sample]:
    """Those that count and that some reward was asked about: without rewards (a teacher says what is good) none."""
    return [sample for sample in counted(samples) if has_reward([sample])]


def has_reward(samples: Sequence[Sample]) -> bool:
    """Whether a reward was asked about one of them, even if it failed."""
    return any(sample.score.parts or sample.score.errors for sample in samples)


def mean_reward(samples: Sequence[Sample]) -> float:
    """Over the samples that count; NaN where none does."""
    return _over_rewards(statistics.fmean, samples)


def deviation_of_rewards(samples: Sequence[Sample]) -> float:
    """Over the samples that count; NaN where none does."""
    return _over_rewards(statistics.pstdev, samples)


def _over_rewards(measure: Callable[[list[float]], float], samples: Sequence[Sample]) -> float:
    totals = [sample.score.total for sample in judged(samples)]
    return measure(totals) if totals else math.nan


def of_k_samples(samples: Sequence[Sample]) -> dict[str, float]:
    """Of k samples to each prompt: their mean reward, the mean of each prompt's best, and the share of prompts with a
    right one; NaN where no sample counts, and without the prompts of which none does."""
    groups = by_group(judged(samples))
    return {
        "val_avg_at_k": mean_reward(samples),
        "val_best_at_k": _mean([max(sample.score.total for sample in group) for group in groups]),
        "val_pass_at_k": _mean([any(map(is_right, group)) for group in groups]),
    }


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan
