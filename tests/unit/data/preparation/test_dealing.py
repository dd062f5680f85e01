"""Rows of a step dealt by their work."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from automodel_cli.data.preparation.dealing import dealt


def loads(costs: np.ndarray, order: np.ndarray, num_bins: int) -> np.ndarray:
    return costs[order].reshape(num_bins, -1).sum(1)


@pytest.mark.parametrize(("rows", "bins"), [(8, 2), (8, 4), (8, 8), (12, 3), (6, 1)])
def test_every_row_once_and_the_heaviest_part_is_near_the_best(rows: int, bins: int):
    rng = np.random.default_rng(rows * bins)
    for _ in range(20):
        costs = rng.integers(1, 100, rows).astype(float)
        order = dealt(costs, bins)
        assert sorted(order.tolist()) == list(range(rows))
        # Without the limit of rows the rule is at most 4/3 of the best, and the best is at least this bound.
        bound = max(costs.sum() / bins, costs.max())
        given = loads(costs, np.arange(rows), bins).max()
        assert loads(costs, order, bins).max() <= max(4 / 3 * bound + costs.max() / 3, min(given, 2 * bound))


def test_the_best_of_all_deals_for_a_small_step():
    costs = np.array([9.0, 1.0, 8.0, 2.0])
    best = min(loads(costs, np.array(order), 2).max() for order in itertools.permutations(range(4)))
    assert loads(costs, dealt(costs, 2), 2).max() == best == 10


def test_equal_costs_do_not_depend_on_anything_but_their_order():
    order = dealt(np.ones(8), 4)
    assert sorted(order.tolist()) == list(range(8))
    assert (order.reshape(4, 2)[:, 0] < order.reshape(4, 2)[:, 1]).all()
    assert order.tolist() == dealt(np.full(8, 7.0), 4).tolist()
