"""One rollout: the samples of a step, what they are worth, and the updates made of them."""

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
    """All samples of a step, whole groups in the order of the prompts; the same on every rank.

    `trained`: numbers of the samples that are trained on. `differs_N`: of each sample, whether the rewards of its group
    are not all the same. `num_sampled`: samples drawn, those of dropped groups too, and `num_drawn_tokens` the tokens
    that the model drew in them. `version`: that of the weights which the step updates. `seconds` of the whole rollout,
    `reward_seconds` those of them in which rewards judged; `wait_seconds` in which training waited for samples that are
    drawn beside it (None: the two take turns). `of_engine`: what the engine tells about itself, and how far the trainer
    is from it.
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
        """What stands on the step line; no reward where there is none to ask."""
        return {
            **({"reward": mean_reward(self.samples)} if has_reward(self.samples) else {}),
            "response_length": sum(sample.num_generated for sample in self.samples) / len(self.samples),
        }

    @cached_property
    def unshown(self) -> dict[str, float | int]:
        """What only metrics.jsonl gets."""
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
        """Of each reward, on how many samples it failed, and how many it should judge. Of environments
        `environment_metrics` tells."""
        scores = [sample.score for sample in self.samples]
        failed = Counter(name for score in scores for name in score.errors)
        asked = failed + Counter(name for score in scores for name in score.parts)
        return {name: (failed[name], asked[name]) for name in sorted(asked) if name != ENVIRONMENT}

    def _of_trained(self) -> dict[str, float]:
        """Of the samples that are trained on; nothing where there are none."""
        found = self.advantages_N[self.trained].tolist()
        if not found:
            return {}
        return {
            "reward_trained": statistics.fmean(self.samples[number].score.total for number in self.trained),
            "advantage_min": min(found),
            "advantage_max": max(found),
            "advantage_mean": statistics.fmean(found),
            "advantage_std": statistics.pstdev(found),
        }

    @property
    def staleness(self) -> int:
        """By how many steps the oldest weights that drew a sample are behind those that it trains."""
        return self.version - min(sample.weight_version for sample in self.samples)

    @property
    def staleness_mean(self) -> float:
        """The same, as a mean over all tokens that were drawn."""
        behind = [sum(self.version - version for version in sample.drawn_versions) for sample in self.samples]
        return sum(behind) / max(1, sum(sample.num_generated for sample in self.samples))


def _by_source(samples: Sequence[Sample]) -> dict[str, float]:
    """The mean reward of the rows of each `source`, or `kind` as tasks call it; nothing where all have the same one."""
    found: dict[str, list[float]] = {}
    for sample in judged(samples):
        row = sample.prompt.row
        found.setdefault(str(row.get("source", row.get("kind", ""))), []).append(sample.score.total)
    if not 1 < len(found) <= _MOST_SOURCES:
        return {}
    return {f"reward_source_{name or 'none'}": statistics.fmean(totals) for name, totals in sorted(found.items())}


def _by_reward(samples: Sequence[Sample]) -> dict[str, float]:
    """The mean of each reward before its weight, over the samples that count and that it judged: the same samples as
    the mean reward's, so that their weighted sum is that where each judged all."""
    found: dict[str, list[float]] = {}
    for sample in counted(samples):
        for name, value in sample.score.parts.items():
            found.setdefault(name, []).append(value)
    return {f"reward_{name}": statistics.fmean(values) for name, values in sorted(found.items())}
