"""Advantages against their closed forms in exact fractions, and what every option promises whatever the rewards."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from automodel_cli.objectives.advantages import group_advantages

OPTIONS = [{"leave_one_out": loo, "normalize": norm} for loo in (False, True) for norm in (False, True)]
REWARDS = {
    "one success": [1.0, 0.0, 0.0, 0.0],
    "one failure": [1.0, 1.0, 0.0, 1.0, 1.0],
    "pair": [0.25, 0.75],
    "others nearly equal": [0.3, 0.3 + 1e-9, 0.3 - 1e-9, 0.9],
    "continuous": torch.rand(16, generator=torch.Generator().manual_seed(0), dtype=torch.float64).tolist(),
    "large and near": [1e4 + 0.5, 1e4, 1e4 + 0.25, 1e4 + 3],
    "negative": [-3.0, -1.0, -2.5, -2.5],
}


def advantages_of(rewards, **options):
    return group_advantages(torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards)).long(), **options)


def closed_form(rewards, leave_one_out, normalize):
    """In exact fractions; RLOO as its definition says, by the mean of the others."""
    exact, n = [Fraction(r) for r in rewards], len(rewards)
    mean = sum(exact) / n
    std = math.sqrt(sum((r - mean) ** 2 for r in exact) / n)
    baselines = [(sum(exact) - r) / (n - 1) if leave_one_out else mean for r in exact]
    return [float(r - b) / (std if normalize else 1.0) for r, b in zip(exact, baselines, strict=True)]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rewards", REWARDS.values(), ids=REWARDS)
def test_closed_form(rewards, options):
    got = advantages_of(rewards, **options).advantages_N.tolist()
    assert got == pytest.approx(closed_form(rewards, **options), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rewards", REWARDS.values(), ids=REWARDS)
def test_zero_mean_bounded_and_monotone(rewards, options):
    got = advantages_of(rewards, **options).advantages_N
    unit = 1.0 if options["normalize"] else max(rewards) - min(rewards)
    assert abs(got.sum()) <= 1e-9 * unit
    n = len(rewards)
    assert got.abs().max() <= math.sqrt(n - 1) * n / (n - 1) * unit * (1 + 1e-9), "no deviation allows more"
    by_reward = got[torch.tensor(rewards, dtype=torch.float64).argsort(stable=True)]
    assert (by_reward.diff() >= 0).all() and by_reward[-1] > by_reward[0]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rewards", REWARDS.values(), ids=REWARDS)
@pytest.mark.parametrize(("scale", "shift"), [(100.0, 0.0), (1e-12, 0.0), (1e200, 0.0), (1.0, -7.0), (0.125, 1e3)])
def test_neither_the_unit_nor_the_origin_of_rewards_matters(rewards, options, scale, shift):
    plain = advantages_of(rewards, **options).advantages_N
    moved = advantages_of([scale * r + shift for r in rewards], **options).advantages_N
    expected = plain if options["normalize"] else plain * scale
    unit = 1.0 if options["normalize"] else scale * (max(rewards) - min(rewards))
    torch.testing.assert_close(moved, expected, rtol=1e-9, atol=max(1e-9 * unit, 1e-12 * abs(shift)))


def test_the_only_rewarded_sample_by_default():
    """(1 - 1/4) / sqrt(3/16), whatever a reward is worth."""
    for reward in (1.0, 0.0385, 100.0):
        got = advantages_of([reward, 0.0, 0.0, 0.0]).advantages_N.tolist()
        assert got == pytest.approx([math.sqrt(3)] + [-1 / math.sqrt(3)] * 3)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rewards_that_differ_by_rounding_teach_nothing(options):
    near = [0.1 + 0.2, 0.3, 0.3, 0.3]
    assert near[0] != near[1]
    rewards = torch.tensor([*near, 1.0, 0.0, 0.7, 0.7], dtype=torch.float64)
    got = group_advantages(rewards, torch.tensor([7] * 4 + [3] * 2 + [1] * 2), **options)
    assert got.differs_N.tolist() == [False] * 4 + [True] * 2 + [False] * 2
    assert not got.advantages_N[~got.differs_N].any() and not got.std_N[~got.differs_N].any()
    assert got.advantages_N[4] == -got.advantages_N[5] > 0


@pytest.mark.parametrize("leave_one_out", [False, True])
def test_invalid_samples_count_for_nobody(leave_one_out):
    rewards, groups = torch.tensor([1.0, 3.0, 100.0]), torch.zeros(3, dtype=torch.int64)
    got = group_advantages(
        rewards, groups, valid_N=torch.tensor([1, 1, 0]), leave_one_out=leave_one_out, normalize=False
    )
    assert got.baseline_N.tolist() == ([3.0, 1.0, 2.0] if leave_one_out else [2.0, 2.0, 2.0])
    alone = group_advantages(rewards, groups, valid_N=torch.tensor([1, 0, 0]), leave_one_out=leave_one_out)
    assert alone.advantages_N.tolist() == [0.0, 0.0, 0.0] and not alone.differs_N.any()


def test_the_batch_scale_is_the_deviation_of_all_rewards():
    rewards, groups = [1.0, 0.0, 0.0, 3.0, 5.0, 4.0], [0, 0, 0, 1, 1, 1]
    got = group_advantages(torch.tensor(rewards), torch.tensor(groups), scale="batch").advantages_N.tolist()
    mean = sum(rewards) / 6
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / 6)
    assert got == pytest.approx([(r - (1 / 3 if g == 0 else 4)) / std for r, g in zip(rewards, groups, strict=True)])


def test_the_mean_scale_gives_a_success_the_weight_of_its_rarity():
    """MaxRL with 0/1 rewards: (r - p) / p; a group without a success teaches nothing."""
    found = group_advantages(torch.tensor([1.0, 0, 0, 0, 0, 0]), torch.tensor([0, 0, 0, 0, 1, 1]), scale="mean")
    assert found.advantages_N.tolist() == [3.0, -1.0, -1.0, -1.0, 0.0, 0.0]
