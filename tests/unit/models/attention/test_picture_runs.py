"""Attention inside pictures, against the definition by loops, in packed rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from automodel_cli.models.attention import flex
from automodel_cli.models.attention.packed import packed_attention
from automodel_cli.models.attention.picture_runs import PictureRuns, TwoWay

ROWS, TOKENS, WINDOW = 2, 24, 4
BOUNDS = (0, 10, 24, 31, 48)
# The second document begins with a picture, next to the one that ends the first. The last row ends with a picture.
IMAGES = [*range(2, 5), *range(6, 10), *range(10, 17), *range(26, 29), *range(40, 48)]


def _sees(rules: TwoWay, window: int | None) -> torch.Tensor:
    """`[N, N]`, by the definition."""
    count = ROWS * TOKENS
    document = [sum(token >= bound for bound in BOUNDS[1:]) for token in range(count)]
    run, runs = {}, 0
    for token in range(count):
        begins = token - 1 not in run or document[token] != document[token - 1]
        if token in IMAGES:
            runs += begins
            run[token] = runs
    rule = rules.full if window is None else rules.sliding
    sees = torch.zeros(count, count, dtype=torch.bool)
    for query in range(count):
        for key in range(count):
            same = query in run and run[query] == run.get(key) and rule != "causal"
            near = window is None or query - key < window
            visible = (same or (key <= query and near)) if rule == "whole" else (same or key <= query) and near
            sees[query, key] = visible and document[query] == document[key]
    return sees


@pytest.mark.parametrize("window", [None, WINDOW])
@pytest.mark.parametrize("rules", [TwoWay("whole", "whole"), TwoWay("whole", "in_window"), TwoWay("causal", "whole")])
def test_packed_attention_equals_the_definition(rules: TwoWay, window: int | None):
    torch.manual_seed(0)
    shown = torch.zeros(ROWS * TOKENS, dtype=torch.bool)
    shown[IMAGES] = True
    runs = PictureRuns.of(shown.view(ROWS, TOKENS), rules)
    query, key, value = (
        torch.randn(ROWS, heads, TOKENS, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)
    )
    cu = torch.tensor(BOUNDS, dtype=torch.int32)
    inputs = {"cu_seq_lens_q": cu, "max_length_q": 17, "sliding_window": window, "picture_runs": runs}
    got, _ = packed_attention(nn.Module(), query, key, value, None, **inputs)
    flat = [x.transpose(1, 2).flatten(0, 1).repeat_interleave(4 // x.shape[1], 1) for x in (query, key, value)]
    scores_HNN = torch.einsum("nhd,mhd->hnm", flat[0], flat[1]) * 8**-0.5
    probs_HNN = scores_HNN.masked_fill(~_sees(rules, window), float("-inf")).softmax(-1)
    want = torch.einsum("hnm,mhd->nhd", probs_HNN, flat[2]).view_as(got)
    assert (got - want).abs().max() < 1e-12
    grads = (torch.autograd.grad(out.square().sum(), (query, key, value)) for out in (got, want))
    for a, b in zip(*grads, strict=True):
        assert (a - b).abs().max() < 1e-12


@pytest.mark.parametrize("window", [None, WINDOW])
def test_blocks_of_flex_attention_contain_the_same_pairs(window: int | None):
    """The definition that the compiled kernel is compared with, and its mask."""
    rules = TwoWay("whole", "in_window")
    shown = torch.zeros(ROWS * TOKENS, dtype=torch.bool)
    shown[IMAGES] = True
    visible = PictureRuns.of(shown.view(ROWS, TOKENS), rules).visible_to(
        torch.tensor(BOUNDS, dtype=torch.int32), window
    )
    index = torch.arange(ROWS * TOKENS)
    pairs = visible.blocks.mask_mod(None, None, index[:, None], index[None])
    assert torch.equal(pairs, _sees(rules, window))
    query, key, value = (torch.randn(ROWS * TOKENS, 2, 16) for _ in range(3))
    got = flex.flex_packed_attention(query, key, value, None, visible, window, 0.25, None)
    assert torch.allclose(got, flex.defined(query, key, value, None, visible, 0.25, None), atol=1e-5)
