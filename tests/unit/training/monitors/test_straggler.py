"""When a rank is called slow: by closed numbers."""

from __future__ import annotations

import torch

from automodel_cli.training.monitors.straggler import SlowRank


def test_a_quarter_above_the_median_over_twenty_steps_is_said_once() -> None:
    slow = SlowRank()
    for step in range(20):
        assert slow.warning() is None
        row = slow.add(torch.tensor([1.0, 1.0, 1.5 if step % 2 else 1.1, 1.02]))
    assert [float(value) for value in row.values()] == [1.0, 1.5, 2.0]
    assert slow.warning() == (2, "1.3 s of its own a step, 1 s the others (median), over 20 steps")
    for _ in range(20):
        slow.add(torch.tensor([1.0, 1.0, 1.5, 1.0]))
    assert slow.warning() is None, "once a rank"


def test_spread_below_a_quarter_and_one_rank_alone_are_nothing() -> None:
    slow = SlowRank()
    for _ in range(30):
        slow.add(torch.tensor([1.0, 1.2]))
    assert slow.warning() is None and slow.add(torch.zeros(1)) == {}
