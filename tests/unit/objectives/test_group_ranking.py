"""Which samples of each group are trained on: by hand."""

from __future__ import annotations

import pytest
import torch

from automodel_cli.config.errors import ConfigError
from automodel_cli.objectives.best_of_n import BestOfN
from automodel_cli.objectives.online_dpo import OnlineDPO
from tests.errors import raises

REWARDS = torch.tensor([0.0, 2.0, 2.0, 1.0, 0.5, 0.5, 0.5, 0.5, 9.0, -1.0, 3.0, 3.0], dtype=torch.float64)
GROUPS = torch.tensor([7, 7, 7, 7, 3, 3, 3, 3, 5, 5, 5, 5])
VALID = torch.tensor([True] * 8 + [False, True, True, True])


@pytest.mark.parametrize(
    ("keep", "threshold", "want"),
    [
        (1, None, [1, 4, 10]),  # of equal rewards the first; the 9.0 is not valid
        (3, None, [1, 2, 3, 4, 5, 6, 9, 10, 11]),
        (2, 0.5, [1, 2, 10, 11]),  # a reward equal to the threshold is not above it
        (4, 1.0, [1, 2, 10, 11]),
        (1, 3.0, []),
    ],
)
def test_the_best_of_each_group_are_taken_one_by_one(keep, threshold, want):
    assert BestOfN(num_kept=keep, threshold=threshold).select(REWARDS, GROUPS, VALID) == [(number,) for number in want]


def test_the_best_and_the_worst_of_a_group_are_a_pair_unless_they_are_equal():
    """Of groups 7 and 5 the first of two best; 3 has no difference; the valid ones of 5 are -1, 3, 3."""
    assert OnlineDPO().select(REWARDS, GROUPS, VALID) == [(1, 0), (10, 9)]
    assert OnlineDPO().select(-REWARDS, GROUPS, VALID) == [(0, 1), (9, 10)]


def test_nothing_kept_is_refused():
    with raises(ConfigError, "out_of_range", keys=("num_kept",), values=(0,), fix="objective.num_kept=1"):
        BestOfN(num_kept=0)
