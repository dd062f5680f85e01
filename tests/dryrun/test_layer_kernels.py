"""Kernels of a layer of experts against those of one written by hand: one more microbatch, nothing recomputed."""

from __future__ import annotations

from collections import Counter

import pytest

from automodel_cli.dryrun.command import trace_rank
from automodel_cli.dryrun.request import Request
from tests.dryrun.test_recipes import _fewer_layers

# How many of each operator somebody would launch who writes the layer, forward and backward, on the same library of
# products and attention and the same two exchanges each way. Not there: casts of weights (once a step), sums of
# gradients (inside the products that make them), additions to the residual (inside the norms), integers of the dispatch
# one by one.
BY_HAND = {
    "_grouped_mm": 6,
    "mm": 9,  # queries, keys and values are one; output, router
    "_flash_attention_forward": 1,
    "_flash_attention_backward": 1,
    "norm Qwen3MoeRMSNorm": 2,  # those of queries and keys are inside of rotary
    "norm Qwen3MoeRMSNorm, backward": 4,
    "rotary": 1,
    "rotary, backward": 1,
    "automodel::route": 1,  # softmax, choice and scaling
    "automodel::route_backward": 1,
    "sort": 1,
    "automodel::dispatch_pairs": 1,
    "automodel::dispatch_arrivals": 1,
    "index_select": 9,  # to send, by expert and back, twice; weights and their gradients
    "gate Qwen3MoeExperts": 1,
    "backward of gate Qwen3MoeExperts": 1,
    "sum over experts": 1,
    "_embedding_bag_forward_only": 1,
    "fsdp::all_gather_copy_in": 2,
    "fsdp::split_with_sizes_copy": 2,
}


def of_one_layer() -> dict[str, tuple[int, float]]:
    """Operator -> launches and seconds that a layer and a microbatch add to a step that has others."""
    count: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    off = "parallelizer.activation_checkpointing=false"
    for layers, microbatches, sign in ((2, 3, 1), (2, 2, -1), (1, 3, -1), (1, 2, 1)):
        overrides = (*_fewer_layers("qwen3_moe_30b_ep8", layers), off)
        for line in trace_rank(Request("qwen3_moe_30b_ep8", overrides, 8, 0, microbatches=microbatches)).kernels:
            count[line.what] += sign * int(line.count)
            seconds[line.what] += sign * line.amount
    return {name: (count[name], seconds[name]) for name in count if count[name]}


@pytest.mark.slow
def test_a_layer_of_experts_takes_at_most_1_3_times_as_long_as_one_written_by_hand() -> None:
    found = of_one_layer()
    launches, took = sum(n for n, _ in found.values()), sum(s for _, s in found.values())
    assert set(BY_HAND) <= set(found), set(BY_HAND) - set(found)
    needed = sum(found[name][1] for name in BY_HAND)
    assert took <= 1.3 * needed, (took, needed)
    assert launches <= 89, found  # 47 by hand
