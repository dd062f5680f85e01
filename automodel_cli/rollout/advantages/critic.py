"""`advantage_estimator=critic`: generalized advantage estimation with a value head (PPO, arXiv:1506.02438)."""

from __future__ import annotations

from automodel_cli.objectives.base import RewardKL
from automodel_cli.rollout.advantages.token_advantages import TokenAdvantages
from automodel_cli.rollout.config import RolloutConfig


def estimator(config: RolloutConfig, kl: RewardKL | None) -> TokenAdvantages:
    """Return the estimator of advantages per token. `kl`: the KL term of each token's reward."""
    return TokenAdvantages(config.gamma, config.gae_lambda, True, config.normalize_advantages, kl)
