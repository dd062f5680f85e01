"""`advantage_estimator: {_target_: ...}`: advantages by your own class."""

from __future__ import annotations

import torch

from automodel_cli.objectives.advantages import Advantages
from automodel_cli.rollout.advantages.base import AdvantageNode, RewardedSamples, estimated


def estimate(node: AdvantageNode, samples: RewardedSamples) -> Advantages:
    """Return advantages per sample. A group differs if one of its valid samples has an advantage other than 0."""
    advantages_N = estimated(node, samples)
    _, group_N = samples.groups_N.unique(return_inverse=True)
    counts = (samples.valid_N & (advantages_N != 0)).long()
    differs_N = torch.zeros(len(counts), dtype=torch.long).scatter_add(0, group_N, counts)[group_N] > 0
    return Advantages(
        advantages_N=advantages_N.where(differs_N, 0.0),
        baseline_N=samples.rewards_N - advantages_N,
        std_N=torch.zeros_like(advantages_N),
        differs_N=differs_N,
    )
