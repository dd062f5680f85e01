"""Ranking of the samples of each group by reward."""

from __future__ import annotations

from torch import Tensor


def ranked_groups(rewards_N: Tensor, groups_N: Tensor, valid_N: Tensor) -> list[list[int]]:
    """Return the indices of the valid samples of each group, best first.

    Equal rewards keep their order. Groups are in the order of their first sample.
    """
    rewards, groups = rewards_N.tolist(), groups_N.tolist()
    members: dict[int, list[int]] = {}
    for index, valid in enumerate(valid_N.tolist()):
        if valid:
            members.setdefault(groups[index], []).append(index)
    return [sorted(indices, key=lambda n: -rewards[n]) for indices in members.values()]
