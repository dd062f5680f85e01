"""Stage counts, spreads, placement and explicit splits: the reference tables, and balance against exhaustive search."""

from __future__ import annotations

import itertools
import random

import pytest

from automodel_cli.config.errors import ConfigError
from automodel_cli.pipelining.cut.layer_ranges import (
    balanced_sizes,
    even_sizes,
    layer_ranges,
    ranges_from_names,
    stage_count,
)
from automodel_cli.pipelining.schedule.stage_ranks import stage_owners, stages_of_rank
from tests.errors import raises

COUNTS = [
    # layers, layers_per_stage, p, kind, rounding -> (stages, per rank) or a piece of the refusal
    (8, 2, 2, "multi", None, (4, 2)),
    (8, 4, 2, "single", None, (2, 1)),
    (8, 3, 2, "multi", "up", (4, 2)),
    (8, 3, 2, "multi", "down", ("stage_count", 1)),
    (8, 3, 2, "multi", None, ("not_divisible", "3 % 2")),
    (8, None, 2, "single", None, (2, 1)),
    (8, None, 2, "multi", None, (4, 2)),
    (8, 1, 2, "multi", None, (8, 4)),
    (24, 3, 2, "multi", None, (8, 4)),
    (24, 6, 2, "multi", None, (4, 2)),
    (24, 12, 2, "single", None, (2, 1)),
    (48, 2, 4, "multi", None, (24, 6)),
    (32, 32, 4, "single", "up", (4, 1)),
    (32, 4, 4, "multi", "down", (8, 2)),
    (32, 5, 4, "multi", "up", (8, 2)),
    (32, 3, 4, "multi", "down", (8, 2)),
    (32, 7, 4, "multi", None, ("not_divisible", "5 % 4")),
    (32, 6, 4, "single", "up", ("stage_count", 2)),
    (32, 16, 2, "multi", None, ("stage_count", 1)),
    (61, 4, 8, "multi", "up", (16, 2)),
    (61, 4, 8, "multi", "down", (16, 2)),
    (8, 8, 4, "single", "down", ("stage_count", 0)),
    (32, None, 4, "single", None, (4, 1)),
    (32, None, 4, "multi", None, (8, 2)),
    (8, 0, 2, "multi", None, ("out_of_range", "layers_per_stage=0")),
    (8, None, 2, "multi", "sideways", ("invalid_choice", "sideways")),
]


@pytest.mark.parametrize("layers,hint,p,kind,rounding,want", COUNTS)
def test_stage_count(layers, hint, p, kind, rounding, want):
    if isinstance(want[0], int):
        assert stage_count(layers, hint, p, kind, rounding) == want
        return
    code, value = want
    with raises(ConfigError, code, values=(value,)):
        stage_count(layers, hint, p, kind, rounding)


@pytest.mark.parametrize(
    "stages,layers,want",
    [
        (1, 4, [4]),
        (2, 8, [4, 4]),
        (4, 8, [2] * 4),
        (3, 10, [4, 3, 3]),
        (4, 10, [3, 3, 2, 2]),
        (4, 24, [6] * 4),
        (0, 4, None),
        (5, 4, None),
    ],
)
def test_even_sizes(stages, layers, want):
    if want is None:
        with raises(ConfigError, "stage_count", values=(stages, layers)):
            even_sizes(stages, layers)
    else:
        assert even_sizes(stages, layers) == want


@pytest.mark.parametrize(
    "rank,p,stages,style,want",
    [
        (0, 4, 4, "loop", (0,)),
        (3, 4, 4, "loop", (3,)),
        (0, 4, 8, "loop", (0, 4)),
        (3, 4, 8, "loop", (3, 7)),
        (0, 4, 12, "loop", (0, 4, 8)),
        (0, 4, 5, "loop", "not_divisible"),
        (0, 4, 8, "v", (0, 7)),
        (1, 4, 8, "v", (1, 6)),
        (3, 4, 8, "v", (3, 4)),
        (0, 2, 4, "v", (0, 3)),
        (1, 2, 4, "v", (1, 2)),
        (0, 4, 12, "v", "stage_count"),
        (0, 4, 8, "spiral", "invalid_choice"),
    ],
)
def test_placement(rank, p, stages, style, want):
    if isinstance(want, tuple):
        assert stages_of_rank(rank, p, stages, style) == want
        assert all(stage_owners(p, stages, style)[s] == rank for s in want)
    else:
        with raises(ConfigError, want):
            stages_of_rank(rank, p, stages, style)


MODULES = {
    "model",
    "model.embed_tokens",
    "model.layers",
    *(f"model.layers.{i}" for i in range(4)),
    "model.norm",
    "model.rotary_emb",
    "lm_head",
}


def ranges(*stages):
    return ranges_from_names(
        stages,
        layers_prefix="model.layers",
        num_layers=4,
        module_names=MODULES,
        embedding="model.embed_tokens",
        head=["model.norm", "lm_head"],
    )


EMBED, HEAD = "model.embed_tokens", ["model.norm", "lm_head"]
L0, L1, L2, L3 = (f"model.layers.{i}" for i in range(4))


def test_explicit_names():
    assert ranges([EMBED, L0, "model.rotary_emb"], [L1, L2, L3, *HEAD, "model.rotary_emb"]) == [range(1), range(1, 4)]
    assert ranges([EMBED], [L0, L1, L2, L3], HEAD) == [range(0), range(4), range(4, 4)]


@pytest.mark.parametrize(
    ("stages", "code", "values"),
    [
        (
            ([EMBED, L0, "model.layer.1"], [L2, L3, *HEAD]),
            "unknown_name",
            ("model.layer.1", "model.layers.1"),
        ),
        (([EMBED, L0, L1], [L1, L2, L3, *HEAD]), "invalid_value", ("model.layers.1", 0, 1)),
        (([EMBED, L0], [L3, *HEAD]), "stage_count", ("model.layers.1", "model.layers.2")),
        (([EMBED, L0, L2], [L1, L3, *HEAD]), "invalid_value", ("model.layers.1", "model.layers.2")),
        (([L0, L1], [EMBED, L2, L3, *HEAD]), "invalid_value", ("model.embed_tokens", 1, 0)),
        (([EMBED, L0, L1], [L2, L3, "lm_head"]), "invalid_value", ("model.norm", 1)),
    ],
)
def test_explicit_names_rejected(stages, code, values):
    with raises(ConfigError, code, values=values):
        ranges(*stages)


def test_balanced_sizes_is_optimal():
    rng = random.Random(0)
    for _ in range(60):
        layers, stages = rng.randrange(3, 10), rng.randrange(1, 4)
        costs = [rng.choice([1.0, 2.0, 0.3]) for _ in range(layers)]
        embedding, head = rng.choice([0.0, 0.5, 3.0]), rng.choice([0.0, 1.5, 4.0])

        def stage_costs(sizes, costs=costs, embedding=embedding, head=head):
            sums = [sum(costs[i] for i in layer_range) for layer_range in layer_ranges(sizes)]
            sums[0] += embedding
            sums[-1] += head
            return sums

        splits = [s for s in itertools.product(range(1, layers + 1), repeat=stages) if sum(s) == layers]
        best = min(max(stage_costs(s)) for s in splits)
        squares = min(sum(c * c for c in stage_costs(s)) for s in splits if max(stage_costs(s)) <= best + 1e-9)
        got = balanced_sizes(costs, stages, embedding_cost=embedding, head_cost=head)
        assert max(stage_costs(got)) == pytest.approx(best)
        assert sum(c * c for c in stage_costs(got)) == pytest.approx(squares)


def test_balanced_sizes_moves_layers_away_from_the_head():
    assert balanced_sizes([1.0] * 16, 4) == [4, 4, 4, 4]
    assert balanced_sizes([1.0] * 16, 4, head_cost=3.0) == [
        4,
        5,
        5,
        2,
    ]  # of equals, the first stage, which holds most activations, is small
    assert balanced_sizes([1.0, 5.0, 2.0, 3.0], 3) == [1, 1, 2]  # costs 1, 5, 5: the smallest maximum
    # (2, 1, 1) costs 6, 2, 3, which is a smaller sum of squares but a larger maximum
    assert balanced_sizes([1.0] * 4, 3, head_cost=9.0, min_layers=0)[-1] == 0
    with raises(ConfigError, "stage_count", values=(5, 4)):
        balanced_sizes([1.0] * 4, 5)
