"""Result of one rollout: samples, advantages and minibatches of a step."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from automodel_cli.data.batch import Batch
from automodel_cli.rollout.config_checks import ENVIRONMENT
from automodel_cli.rollout.monitoring.environment_metrics import environment_metrics
from automodel_cli.rollout.monitoring.reward_statistics import (
    by_group,
    counted,
    deviation_of_rewards,
    has_reward,
    is_right,
    is_wrong,
    judged,
    mean_reward,
)
from automodel_cli.rollout.samples import Minibatch
from automodel_cli.rollout.types import Sample

_MOST_SOURCES = 32  # more names than that are no sources


@dataclass(frozen=True)
class Rollout:
    """All samples of a step, in complete groups and in the order of the prompts. Equal on every rank.

    - `trained`: indices of the trained samples. `differs_N`: whether the rewards of a sample's group differ.
    - `num_sampled`, `num_drawn_tokens`: generated samples and tokens, including dropped groups.
    - `version`: version of the weights that the step updates.
    - `seconds`: time of the rollout. `reward_seconds`: time of rewards. `wait_seconds`: time that training waited for
      prefetched samples, None without a queue.
    - `of_engine`: metrics of the engine, and differences between sampler and trainer.
    """

    version: int
    samples: list[Sample]
    advantages_N: Tensor
    differs_N: Tensor
    trained: list[int]
    updates: list[Minibatch]
    num_passes: int
    num_sampled: int
    num_drawn_tokens: int
    seconds: float
    reward_seconds: float
    wait_seconds: float | None
    of_engine: Mapping[str, float]

    def passes(self) -> Iterator[list[Batch]]:
        """This rank's microbatches of each optimizer update."""
        for _ in range(self.num_passes):
            for update in self.updates:
                yield update.batches

    @property
    def shown(self) -> dict[str, float]:
        """Values for the step line. No reward if none is configured."""
        return {
            **({"reward": mean_reward(self.samples)} if has_reward(self.samples) else {}),
            "response_length": sum(sample.num_generated for sample in self.samples) / len(self.samples),
        }

    @cached_property
    def unshown(self) -> dict[str, float | int]:
        """Values for metrics.jsonl only."""
        samples, lengths = self.samples, [sample.num_generated for sample in self.samples]
        groups = by_group(samples)
        differs = {s.place for s, differs in zip(samples, self.differs_N.tolist(), strict=True) if differs}
        compared = [group for group in by_group(counted(samples)) if len(group) > 1]
        equal = [group for group in compared if group[0].place not in differs]
        of_equal = mean_reward([sample for group in equal for sample in group])
        return {
            **self._of_trained(),
            **({} if math.isnan(of_equal) else {"reward_zero_std_groups": of_equal}),
            **({"reward_std": deviation_of_rewards(samples)} if has_reward(samples) else {}),
            **_by_reward(samples),
            "reward_errors": sum(bool(sample.score.errors) for sample in samples),
            "num_judged": len(samples),
            "num_excluded": len(samples) - len(counted(samples)),
            "response_length_max": max(lengths),
            "turns": statistics.fmean(sample.num_turns for sample in samples),
            "truncation_rate": sum(sample.truncated for sample in samples) / len(samples),
            "num_groups": len({sample.place for sample in samples}),
            "num_zero_std_groups": len(equal),
            "num_solved_groups": sum(all(map(is_right, group)) for group in groups),
            "num_failed_groups": sum(all(map(is_wrong, group)) for group in groups),
            "num_sampled": self.num_sampled,
            "num_trained_samples": len(self.trained),
            "num_unused_groups": len({s.place for s in samples} - {samples[n].place for n in self.trained}),
            **_by_source(samples),
            "rollout_seconds": self.seconds,
            "generate_seconds": self.seconds - self.reward_seconds,
            "generate_tokens_per_second": self.num_drawn_tokens / max(self.seconds - self.reward_seconds, 1e-9),
            "reward_seconds": self.reward_seconds,
            "rollout_tokens_per_second": self.num_drawn_tokens / max(self.seconds, 1e-9),
            "weight_version": min(sample.weight_version for sample in samples),
            "staleness": self.staleness,
            **environment_metrics(samples),
            "staleness_mean": self.staleness_mean,
            **({} if self.wait_seconds is None else {"rollout_wait_seconds": self.wait_seconds}),
            **self.of_engine,
        }

    @property
    def failures(self) -> dict[str, tuple[int, int]]:
        """Return for each reward the number of failures and of scored samples. `environment_metrics` covers
        environments."""
        scores = [sample.score for sample in self.samples]
        failed = Counter(name for score in scores for name in score.errors)
        num_calls = failed + Counter(name for score in scores for name in score.parts)
        return {name: (failed[name], num_calls[name]) for name in sorted(num_calls) if name != ENVIRONMENT}

    def _of_trained(self) -> dict[str, float]:
        """Return statistics of the trained samples. Empty if there are none."""
        advantages = self.advantages_N[self.trained].tolist()
        if not advantages:
            return {}
        return {
            "reward_trained": statistics.fmean(self.samples[number].score.total for number in self.trained),
            "advantage_min": min(advantages),
            "advantage_max": max(advantages),
            "advantage_mean": statistics.fmean(advantages),
            "advantage_std": statistics.pstdev(advantages),
        }

    @property
    def staleness(self) -> int:
        """Return by how many versions the oldest weights that sampled a token are behind the trained weights."""
        return self.version - min(sample.weight_version for sample in self.samples)

    @property
    def staleness_mean(self) -> float:
        """Return the same as the mean over all generated tokens."""
        behind = [sum(self.version - version for version in sample.drawn_versions) for sample in self.samples]
        return sum(behind) / max(1, sum(sample.num_generated for sample in self.samples))


def _by_source(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean reward by `source` of the rows, or by `kind`. Empty if all rows have the same."""
    rewards: dict[str, list[float]] = {}
    for sample in judged(samples):
        row = sample.prompt.row
        rewards.setdefault(str(row.get("source", row.get("kind", ""))), []).append(sample.score.total)
    if not 1 < len(rewards) <= _MOST_SOURCES:
        return {}
    return {f"reward_source_{name or 'none'}": statistics.fmean(totals) for name, totals in sorted(rewards.items())}


def _by_reward(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the unweighted mean of each reward over the valid samples that it scored. If every reward scored all
    samples, their weighted sum is the mean reward."""
    rewards: dict[str, list[float]] = {}
    for sample in counted(samples):
        for name, value in sample.score.parts.items():
            rewards.setdefault(name, []).append(value)
    return {f"reward_{name}": statistics.fmean(values) for name, values in sorted(rewards.items())}
