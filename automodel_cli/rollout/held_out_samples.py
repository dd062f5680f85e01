"""Several samples to each held-out prompt: how good they are on average, and how often one of them is right."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from automodel_cli.rollout.experience import Sample


def is_right(sample: Sample) -> bool:
    """Every reward that judged it gave at least 1; one that nobody judged is not."""
    return bool(sample.score.parts) and min(sample.score.parts.values()) >= 1


def is_wrong(sample: Sample) -> bool:
    """Every reward that judged it gave at most 0."""
    return bool(sample.score.parts) and max(sample.score.parts.values()) <= 0


def by_group(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Samples of one prompt together."""
    found: dict[int, list[Sample]] = {}
    for sample in samples:
        found.setdefault(sample.place, []).append(sample)
    return list(found.values())


def of_k_samples(samples: Sequence[Sample]) -> dict[str, float]:
    """Of k samples to each prompt: their mean reward, the mean of each prompt's best, and the share of prompts with a
    right one."""
    groups = by_group(samples)
    return {
        "val_avg_at_k": statistics.fmean(sample.score.total for sample in samples),
        "val_best_at_k": statistics.fmean(max(sample.score.total for sample in group) for group in groups),
        "val_pass_at_k": statistics.fmean(any(map(is_right, group)) for group in groups),
    }
