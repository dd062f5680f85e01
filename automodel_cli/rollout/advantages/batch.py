"""`advantage_estimator=batch`: discounted rewards per token, whitened over the step (REINFORCE++, arXiv:2501.03262)."""

from __future__ import annotations

from automodel_cli.objectives.base import RewardKL
from automodel_cli.rollout.advantages.token_advantages import TokenAdvantages
from automodel_cli.rollout.config import RolloutConfig


def estimator(config: RolloutConfig, kl: RewardKL | None) -> TokenAdvantages:
    """Return the estimator of advantages per token. `kl`: the KL term of each token's reward."""
    return TokenAdvantages(config.gamma, 1.0, False, config.normalize_advantages, kl)
