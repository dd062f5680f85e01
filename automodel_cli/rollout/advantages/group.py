"""`advantage_estimator=group`: rewards compared with the other samples of the prompt (GRPO, Dr. GRPO, RLOO, MaxRL)."""

from __future__ import annotations

from automodel_cli.objectives.advantages import Advantages, group_advantages
from automodel_cli.rollout.advantages.base import RewardedSamples
from automodel_cli.rollout.config import RolloutConfig


def estimate(config: RolloutConfig, samples: RewardedSamples) -> Advantages:
    """Return advantages per sample (`objectives/advantages.py` has the formulas)."""
    return group_advantages(
        samples.rewards_N,
        samples.groups_N,
        valid_N=samples.valid_N,
        leave_one_out=config.leave_one_out,
        normalize=config.normalize_advantages,
        scale=config.reward_scaling,
    )
