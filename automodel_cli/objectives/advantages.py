"""How much better each sample of a prompt is than the prompt's other samples."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_EPS = 1e-6


@dataclass(frozen=True)
class Advantages:
    """float64, one value per sample. `differs_N` (bool): the rewards of the sample's group are not all the same, so
    the group has something to teach.
    """

    advantages_N: Tensor
    baseline_N: Tensor
    std_N: Tensor
    differs_N: Tensor


def group_advantages(
    rewards_N: Tensor,
    groups_N: Tensor,
    *,
    valid_N: Tensor | None = None,
    leave_one_out: bool = True,
    normalise: bool = True,
) -> Advantages:
    """Reward minus baseline; with `normalise` divided by the standard deviation where that is above 0.

    `groups_N`: int64, the prompt of each sample. Baseline and deviation are those of the group's samples, with
    `leave_one_out` of its *other* samples. Samples that are not `valid_N` count
    for nobody and get a baseline from the valid ones. In a group with at most one valid sample every baseline is the
    sample's own reward.
    """
    rewards_N = rewards_N.double()
    valid_N = torch.ones_like(rewards_N) if valid_N is None else valid_N.double()
    _, group_N = groups_N.unique(return_inverse=True)
    num_groups = len(groups_N.unique())

    def total(values_N: Tensor) -> Tensor:
        return values_N.new_zeros(num_groups).scatter_add(0, group_N, values_N * valid_N)[group_N]

    # measured from the group's smallest reward: equal rewards then have a deviation of exactly 0
    lowest_N, highest_N = (_extreme(rewards_N, group_N, valid_N, num_groups, kind) for kind in ("amin", "amax"))
    above_N = rewards_N - lowest_N
    own_N = valid_N * leave_one_out
    count_N = total(torch.ones_like(rewards_N))
    others_N = (count_N - own_N).clamp(min=1)
    mean_N = (total(above_N) - own_N * above_N) / others_N
    square_N = (total(above_N.square()) - own_N * above_N.square()) / others_N
    variance_N = (square_N - mean_N.square()) * others_N / (others_N - 1).clamp(min=1)
    alone_N = count_N <= 1
    std_N = variance_N.clamp(min=0).sqrt().masked_fill(alone_N | (others_N <= 1), 0.0)
    baseline_N = torch.where(alone_N, rewards_N, lowest_N + mean_N)
    advantages_N = rewards_N - baseline_N
    if normalise:
        advantages_N = torch.where(std_N > 0, advantages_N / (std_N + _EPS), advantages_N)
    return Advantages(advantages_N, baseline_N, std_N, highest_N > lowest_N)


def _extreme(values_N: Tensor, group_N: Tensor, valid_N: Tensor, num_groups: int, kind: str) -> Tensor:
    """Smallest or largest valid value of each sample's group; the sample's own where no sample is valid."""
    start = float("inf") if kind == "amin" else float("-inf")
    values = torch.where(valid_N > 0, values_N, start)
    found_N = values.new_full((num_groups,), start).scatter_reduce(0, group_N, values, kind)[group_N]
    return torch.where(found_N.isfinite(), found_N, values_N)
