"""Statistics of rewards, without samples that are excluded by `on_error: skip`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

from automodel_cli.rollout.types import Sample


def is_right(sample: Sample) -> bool:
    """Return whether all applicable rewards scored the sample with at least 1. False without rewards."""
    return bool(sample.score.parts) and not sample.score.errors and min(sample.score.parts.values()) >= 1


def is_wrong(sample: Sample) -> bool:
    """Return whether all applicable rewards scored the sample with at most 0."""
    return bool(sample.score.parts) and not sample.score.errors and max(sample.score.parts.values()) <= 0


def by_group(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples of one prompt together."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.place, []).append(sample)
    return list(groups.values())


def counted(samples: Sequence[Sample]) -> list[Sample]:
    """Return the valid samples, without those that `on_error: skip` excludes."""
    return [sample for sample in samples if sample.score.valid]


def judged(samples: Sequence[Sample]) -> list[Sample]:
    """Return the valid samples with at least one applicable reward."""
    return [sample for sample in counted(samples) if has_reward([sample])]


def has_reward(samples: Sequence[Sample]) -> bool:
    """Return whether a sample has an applicable reward, even a failed one."""
    return any(sample.score.parts or sample.score.errors for sample in samples)


def mean_reward(samples: Sequence[Sample]) -> float:
    """Return the mean reward of valid samples. NaN if there are none."""
    return _over_rewards(statistics.fmean, samples)


def deviation_of_rewards(samples: Sequence[Sample]) -> float:
    """Return the standard deviation of the rewards of valid samples. NaN if there are none."""
    return _over_rewards(statistics.pstdev, samples)


def _over_rewards(measure: Callable[[list[float]], float], samples: Sequence[Sample]) -> float:
    totals = [sample.score.total for sample in judged(samples)]
    return measure(totals) if totals else math.nan


def of_k_samples(samples: Sequence[Sample]) -> dict[str, float]:
    """Return metrics of k samples per prompt: mean reward, mean of the best reward, and share of prompts with a
    correct sample.

    NaN if no sample is valid. Prompts without valid samples are excluded.
    """
    groups = by_group(judged(samples))
    return {
        "val_avg_at_k": mean_reward(samples),
        "val_best_at_k": _mean([max(sample.score.total for sample in group) for group in groups]),
        "val_pass_at_k": _mean([any(map(is_right, group)) for group in groups]),
    }


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan
