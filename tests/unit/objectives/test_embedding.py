"""Losses of embeddings: closed forms, and what is no negative. Gradients on ranks: tests/dist/test_embedding.py."""

from __future__ import annotations

import math

import pytest
import torch

from automodel_cli.config.errors import ConfigError
from automodel_cli.objectives.embedding import CosineScore, Documents, InfoNCE
from tests.errors import raises


def documents(*vectors: list[float], roles: list[int], hashes: list[int] | None = None) -> Documents:
    pooled_ND = torch.tensor(vectors, dtype=torch.float64)
    hashes_N = torch.tensor(hashes or range(len(roles)))
    return Documents(pooled_ND, torch.tensor(roles), torch.linspace(0, 1, len(roles)), hashes_N)


UP, RIGHT = [0.0, 2.0], [3.0, 0.0]


def test_infonce_of_two_candidates():
    """Similarities 1 and 0 at temperature 0.5 give scores 2 and 0."""
    losses_N, gradients_ND = InfoNCE(temperature=0.5).global_loss(documents(UP, UP, RIGHT, roles=[0, 1, 2]))
    assert losses_N.tolist() == pytest.approx([math.log(1 + math.exp(-2)), 0, 0])
    assert gradients_ND.shape == (3, 2) and gradients_ND[0, 0] != 0
    assert gradients_ND[0] @ torch.tensor(UP, dtype=torch.float64) == pytest.approx(0), "the norm has no effect"


def test_copies_of_the_own_passage_are_no_negatives():
    four = documents(UP, UP, RIGHT, UP, roles=[0, 1, 0, 1], hashes=[0, 7, 2, 7])
    assert InfoNCE().global_loss(four)[0].tolist() == pytest.approx([0, 0, 0, 0])
    other = four._replace(hashes_N=torch.arange(4))
    assert InfoNCE().global_loss(other)[0][0].item() == pytest.approx(math.log(2))


def test_without_in_batch_negatives_only_those_of_the_row_count():
    four = documents(UP, UP, RIGHT, RIGHT, UP, roles=[0, 1, 0, 1, 2])
    losses = InfoNCE(temperature=1.0, in_batch_negatives=False).global_loss(four)[0]
    assert losses.tolist() == pytest.approx([0, 0, math.log(1 + math.exp(-1)), 0, 0])


def test_matryoshka_is_the_mean_over_prefixes():
    four = documents([1.0, 1.0], [1.0, 0.0], [0.0, 1.0], roles=[0, 1, 2])
    sizes = [InfoNCE(dimensions=[size]).global_loss(four)[0][0].item() for size in (1, 2)]
    assert InfoNCE(dimensions=[2, 1]).global_loss(four)[0][0].item() == pytest.approx(sum(sizes) / 2)
    assert InfoNCE().global_loss(four)[0][0].item() == pytest.approx(sizes[1])


def test_scored_pairs():
    pair = documents(UP, RIGHT, roles=[0, 1])._replace(scores_N=torch.tensor([0.3, 0.3]))
    assert CosineScore().global_loss(pair)[0].tolist() == pytest.approx([0.09, 0], abs=1e-6)


def test_settings_are_checked():
    with raises(ConfigError, "out_of_range", keys=("temperature",), fix="objective.temperature=0.05"):
        InfoNCE(temperature=0)
    with raises(ConfigError, "not_supported", keys=("pooling",)):
        CosineScore(pooling="cls")
    with raises(ConfigError, "out_of_range", keys=("dimensions",)):
        InfoNCE(dimensions=[0])
