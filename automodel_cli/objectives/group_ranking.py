"""Samples of each group by their rewards."""

from __future__ import annotations

from torch import Tensor


def ranked_groups(rewards_N: Tensor, groups_N: Tensor, valid_N: Tensor) -> list[list[int]]:
    """The numbers of the valid samples of each group, best first, of equal rewards the first one first; groups in the
    order of their first sample."""
    rewards, groups = rewards_N.tolist(), groups_N.tolist()
    found: dict[int, list[int]] = {}
    for number, valid in enumerate(valid_N.tolist()):
        if valid:
            found.setdefault(groups[number], []).append(number)
    return [sorted(numbers, key=lambda n: -rewards[n]) for numbers in found.values()]
