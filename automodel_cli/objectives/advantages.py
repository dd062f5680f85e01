"""How much better each sample of a prompt is than the prompt's other samples.

With n valid samples in a group, rewards r, their mean m and their deviation s = sqrt(mean of (r - m)^2):

| `leave_one_out` | `normalise` | advantage | from |
|---|---|---|---|
| false | true | (r - m) / s | GRPO, arXiv:2402.03300, section 4.1.2 |
| false | false | r - m | Dr. GRPO, arXiv:2503.20783 |
| true | false | r - mean of the n - 1 others = n / (n - 1) (r - m) | RLOO, arXiv:2402.14740 |
| true | true | n / (n - 1) (r - m) / s | RLOO in units of the whole group's deviation |
| | true, `scale=batch` | the same over the deviation of all rewards of the step | arXiv:2508.08221 |
| | true, `scale=mean` | the same over m: (r - m) / m | MaxRL, arXiv:2602.02710 |

All sum to 0 over a group, rise with the reward, and do not change when a constant is added to all rewards; the
normalised ones neither when all are multiplied by one. Hence s is always that of the whole group: with the deviation of
the n - 1 *others* samples of one group would be on n different scales, and the only good one of a group would have
none at all. Libraries that call `torch.std` (TRL, NeMo-RL) divide by s sqrt(n / (n - 1)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_FLOOR = 1e-6
"""A deviation of at most this share of the group's largest absolute reward is rounding (rewards may come from fp32)."""


@dataclass(frozen=True)
class Advantages:
    """float64, one value per sample. `differs_N` (bool): the rewards of the sample's group are not all the same, so the
    group has something to teach; where they are, advantages and `std_N` are exactly 0.
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
    leave_one_out: bool = False,
    normalise: bool = True,
    scale: Literal["group", "batch", "mean"] = "group",
) -> Advantages:
    """The table above; `groups_N`: int64, the prompt of each sample. `scale`: in place of s, what `normalise` divides
    by: the deviation of all valid rewards (`batch`), or the size of m (`mean`; a group whose m is 0 counts as equal).

    Samples that are not `valid_N` count for nobody and are compared with the valid ones. In a group with at most one
    valid sample every baseline is the sample's own reward.
    """
    rewards_N = rewards_N.double()
    valid_N = torch.ones_like(rewards_N) if valid_N is None else valid_N.double()
    _, group_N = groups_N.unique(return_inverse=True)
    num_groups = len(groups_N.unique())

    def total(values_N: Tensor) -> Tensor:
        return values_N.new_zeros(num_groups).scatter_add(0, group_N, values_N * valid_N)[group_N]

    # from 0, the group's smallest reward, to 1: equal rewards give exactly 0, and no square can overflow
    lowest_N, highest_N = (_extreme(rewards_N, group_N, valid_N, num_groups, kind) for kind in ("amin", "amax"))
    range_N = highest_N - lowest_N
    unit_N = torch.where(range_N > 0, (rewards_N - lowest_N) / range_N, 0.0)
    count_N = total(torch.ones_like(rewards_N))
    above_N = unit_N - total(unit_N) / count_N.clamp(min=1)
    unit_std_N = (total(above_N.square()) / count_N.clamp(min=1)).sqrt()
    if leave_one_out:
        above_N = torch.where(valid_N > 0, above_N * count_N / (count_N - 1).clamp(min=1), above_N)

    largest_N = torch.maximum(highest_N.abs(), lowest_N.abs())
    differs_N = (count_N > 1) & (unit_std_N * range_N > _FLOOR * largest_N)
    raw_N = torch.where(count_N > 1, above_N * range_N, 0.0)
    scaled_N = above_N / unit_std_N if normalise else raw_N
    if normalise and scale == "batch":
        scaled_N = raw_N / rewards_N[valid_N > 0].std(correction=0)
    elif normalise and scale == "mean":
        mean_N = total(rewards_N) / count_N.clamp(min=1)
        differs_N = differs_N & (mean_N.abs() > _FLOOR * largest_N)
        scaled_N = raw_N / mean_N.abs()
    return Advantages(
        advantages_N=torch.where(differs_N, scaled_N, 0.0),
        baseline_N=rewards_N - raw_N,
        std_N=torch.where(differs_N, unit_std_N * range_N, 0.0),
        differs_N=differs_N,
    )


def _extreme(values_N: Tensor, group_N: Tensor, valid_N: Tensor, num_groups: int, kind: str) -> Tensor:
    """Smallest or largest valid value of each sample's group; the sample's own where no sample is valid."""
    start = float("inf") if kind == "amin" else float("-inf")
    values = torch.where(valid_N > 0, values_N, start)
    found_N = values.new_full((num_groups,), start).scatter_reduce(0, group_N, values, kind)[group_N]
    return torch.where(found_N.isfinite(), found_N, values_N)
