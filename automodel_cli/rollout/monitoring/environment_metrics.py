"""Metrics of the episodes of a step."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from automodel_cli.rollout.monitoring.reward_statistics import mean_reward
from automodel_cli.rollout.types import Account, Sample


def environment_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Return `environment_...` over all episodes. With several environments, also `environment_NAME_...` of each, with
    its share of the samples and their rewards. Empty without episodes."""
    accounts = [(sample, sample.account) for sample in samples if sample.account is not None]
    if not accounts:
        return {}
    metrics = dict(_of(accounts, "environment"))
    names = sorted({str(sample.environment) for sample, _ in accounts})
    if names == ["environment"]:
        return metrics
    for name in names:
        selected = [(sample, account) for sample, account in accounts if sample.environment == name]
        metrics |= _of(selected, f"environment_{name}")
        metrics[f"environment_{name}_share"] = len(selected) / len(samples)
        metrics[f"environment_{name}_reward"] = mean_reward([sample for sample, _ in selected])
        metrics[f"environment_{name}_turns"] = statistics.fmean(sample.num_turns for sample, _ in selected)
        metrics[f"environment_{name}_truncation_rate"] = statistics.fmean(sample.truncated for sample, _ in selected)
    return metrics


def _of(accounts: Sequence[tuple[Sample, Account]], prefix: str) -> Iterator[tuple[str, float]]:
    yield f"{prefix}_failed", statistics.fmean(sample.failed for sample, _ in accounts)
    yield f"{prefix}_retries", sum(account.retries for _, account in accounts)
    yield f"{prefix}_timeouts", sum(account.timeouts for _, account in accounts)
    yield f"{prefix}_seconds", statistics.fmean(account.seconds for _, account in accounts)
    yield f"{prefix}_seconds_max", max(account.slowest for _, account in accounts)
