"""An advantage estimator of your own: the rank of a reward within its group, from -1 to 1.

    automodel grpo llm -c quickstart_grpo rollout.normalize_advantages=true \
        'rollout.advantage_estimator={_target_: own_advantages.Ranks}' --trust-package own_advantages

Ranks ignore how far rewards differ, so one outlier does not dominate a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from automodel_cli.rollout.advantages.base import RewardedSamples


@dataclass(frozen=True)
class Ranks:
    """`power` above 1 emphasizes the best and the worst samples. Equal rewards have equal ranks."""

    power: float = 1.0

    def estimate(self, samples: RewardedSamples) -> Tensor:
        advantages_N = torch.zeros_like(samples.rewards_N)
        for group in samples.groups_N.unique():
            chosen = (samples.groups_N == group) & samples.valid_N
            rewards = samples.rewards_N[chosen]
            above = (rewards[:, None] - rewards).sign().sum(1) / max(len(rewards) - 1, 1)
            advantages_N[chosen] = above.sign() * above.abs() ** self.power
        return advantages_N
