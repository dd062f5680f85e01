"""Group-relative advantages: how much better each sample of a prompt is than the other samples of the prompt.

For n valid samples of a group with rewards r, mean m and standard deviation s = sqrt(mean of (r - m)^2):

| `leave_one_out` | `normalize` | advantage | source |
|---|---|---|---|
| false | true | (r - m) / s | GRPO, arXiv:2402.03300, section 4.1.2 |
| false | false | r - m | Dr. GRPO, arXiv:2503.20783 |
| true | false | r - mean of the n - 1 others = n / (n - 1) (r - m) | RLOO, arXiv:2402.14740 |
| true | true | n / (n - 1) (r - m) / s | RLOO in units of the group's deviation |
| | true, `scale=batch` | the same, divided by the deviation of all rewards of the step | arXiv:2508.08221 |
| | true, `scale=mean` | the same, divided by m: (r - m) / m | MaxRL, arXiv:2602.02710 |

Example: rewards 1, 0, 0, 0 have m = 0.25 and s = 0.433. The GRPO advantages are 1.73, -0.58, -0.58, -0.58.

All advantages of a group sum to 0, increase with the reward, and do not change if a constant is added to all rewards.
Normalized advantages do not change if all rewards are multiplied by a constant. Therefore s is that of the full group.
With the deviation of the n - 1 *other* samples, the samples of a group would have n different scales, and the only good
sample of a group would have none. Libraries that use `torch.std` (TRL, NeMo-RL) divide by s sqrt(n / (n - 1)).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_FLOOR = 1e-6
"""Deviations up to this fraction of the group's largest absolute reward count as rounding (rewards may be fp32)."""


@dataclass(frozen=True)
class Advantages:
    """Advantages of N samples, float64.

    `differs_N` (bool): the rewards of the sample's group are not all equal. Otherwise advantages and `std_N` are
    exactly 0.
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
    normalize: bool = True,
    scale: Literal["group", "batch", "mean"] = "group",
) -> Advantages:
    """Compute the advantages of the table above.

    Args:
        groups_N: int64, the prompt of each sample.
        valid_N: samples to include. Others do not affect the statistics and are compared with the valid samples. In a
            group with at most one valid sample, every baseline is the sample's own reward.
        scale: divisor of `normalize`: the deviation of the group, of all valid rewards (`batch`), or |m| (`mean`; a
            group with m = 0 counts as equal).
    """
    rewards_N = rewards_N.double()
    valid_N = torch.ones_like(rewards_N) if valid_N is None else valid_N.double()
    _, group_N = groups_N.unique(return_inverse=True)
    num_groups = len(groups_N.unique())

    def total(values_N: Tensor) -> Tensor:
        # Sum over the valid samples of each group, repeated for each of its samples.
        return values_N.new_zeros(num_groups).scatter_add(0, group_N, values_N * valid_N)[group_N]

    # Scale each group to [0, 1]. Equal rewards then give exactly 0, and squares cannot overflow.
    lowest_N, highest_N = (_extreme(rewards_N, group_N, valid_N, num_groups, kind) for kind in ("amin", "amax"))
    range_N = highest_N - lowest_N
    unit_N = torch.where(range_N > 0, (rewards_N - lowest_N) / range_N, 0.0)
    count_N = total(torch.ones_like(rewards_N))
    above_N = unit_N - total(unit_N) / count_N.clamp(min=1)
    unit_std_N = (total(above_N.square()) / count_N.clamp(min=1)).sqrt()
    if leave_one_out:
        # Rewards 1, 0, 0, 0: r - m = 0.75 and -0.25, times 4/3 = 1 and -1/3. The good sample is compared with 0, the
        # mean of the others.
        above_N = torch.where(valid_N > 0, above_N * count_N / (count_N - 1).clamp(min=1), above_N)

    largest_N = torch.maximum(highest_N.abs(), lowest_N.abs())
    # A relative bound: rewards 0.1 + 0.2 and 0.3 differ in the last bit, and must not become advantages of +-1.
    differs_N = (count_N > 1) & (unit_std_N * range_N > _FLOOR * largest_N)
    # A single sample has nothing to be compared with. Its advantage is 0 and its baseline its own reward.
    raw_N = torch.where(count_N > 1, above_N * range_N, 0.0)
    scaled_N = above_N / unit_std_N if normalize else raw_N
    if normalize and scale == "batch":
        scaled_N = raw_N / rewards_N[valid_N > 0].std(correction=0)
    elif normalize and scale == "mean":
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
    """Return the smallest or largest valid value of each sample's group, or the sample's own value if none is valid."""
    start = float("inf") if kind == "amin" else float("-inf")
    values = torch.where(valid_N > 0, values_N, start)
    found_N = values.new_full((num_groups,), start).scatter_reduce(0, group_N, values, kind)[group_N]
    return torch.where(found_N.isfinite(), found_N, values_N)
