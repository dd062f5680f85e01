"""FlexAttention in a dry run: no memory of tokens x tokens, and the FLOPs of the blocks that its mask has."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from automodel_cli.dryrun.types import RankResult, TraceRequest
from tests.dryrun.test_tiny import _LAYERS, _PLAIN
from tests.dryrun.traces import trace_in_fork

TOKENS, HEADS, WIDTH, LAYERS = 1024, 4, 16, _LAYERS
GEMMA = (
    *_PLAIN,
    "model.config.model_type=gemma2",
    f"model.config.head_dim={WIDTH}",
    f"model.config.sliding_window={TOKENS}",
    f"data.seq_len={TOKENS}",
    "parallelizer.activation_checkpointing=false",
)
SCORES = HEADS * TOKENS**2 * 4
"""Bytes of one layer's scores in float32."""


@cache
def traced(conf: str, gpus: int, rank: int, *overrides: str, **options: Any) -> RankResult:
    return trace_in_fork(TraceRequest(conf, overrides, gpus, rank, **options))


def _count(found: RankResult, name: str) -> int:
    return sum(line.count for line in found.kernels if line.what == name)


@pytest.mark.nightly
def test_soft_caps_cost_the_pairs_of_their_blocks_in_one_kernel_and_no_scores() -> None:
    """Rows of one document are 36 blocks of 128 x 128 below the diagonal, of four documents 4 x 3."""
    whole, four = (traced("llama3_8b_tp2cp2_tiny", 1, 0, *GEMMA, document=n) for n in (TOKENS, TOKENS // 4))
    calls = LAYERS * whole.measured_microbatches
    for found in (whole, four):
        assert found.peak < SCORES
        assert _count(found, "flex_attention") == _count(found, "flex_attention_backward") == calls
    products = 2 + 7  # forward: scores, outputs; backward: both of them twice over, and the three gradients
    pairs = calls * HEADS * (36 - 4 * 3) * 128**2
    # and of the head, which has a few labels less in more documents
    assert whole.flops - four.flops == pytest.approx(products * 2 * pairs * WIDTH, rel=1e-3)


@pytest.mark.nightly
def test_soft_caps_were_tokens_by_tokens() -> None:
    dense = traced("llama3_8b_tp2cp2_tiny", 1, 0, *GEMMA, "model.attention_kernel=dense", document=TOKENS)
    assert dense.peak > 2 * LAYERS * SCORES  # tanh and softmax of each layer


@pytest.mark.nightly
@pytest.mark.parametrize("context_parallel", ["all_gather", "ring"])
def test_shared_rows_are_no_scores_either(context_parallel: str) -> None:
    given = (*GEMMA, "mesh.tp_size=2", "mesh.cp_size=2", f"parallelizer.context_parallel={context_parallel}")
    found = traced("llama3_8b_tp2cp2_tiny", 8, 3, *given, document=TOKENS)
    assert found.peak < 2 * LAYERS * SCORES / 8  # half of the heads, half of the queries and, in a ring, of the keys
    parts = 2 if context_parallel == "ring" else 1
    calls = LAYERS * found.measured_microbatches * parts
    assert _count(found, "flex_attention") == calls * parts  # a ring's backward runs each part once more
    assert _count(found, "flex_attention_backward") == calls


@pytest.mark.nightly
def test_latent_attention_keeps_narrow_values() -> None:
    """Padding makes values and outputs as wide as keys in every layer; FlexAttention takes them as they are."""
    given = ("parallelizer.mp_policy.param_dtype=bfloat16", "parallelizer.activation_checkpointing=false")
    flash = traced("moonlight_16b_pp2ep4_tiny", 8, 0, *given)
    flex = traced("moonlight_16b_pp2ep4_tiny", 8, 0, *given, "model.attention_kernel=flex")
    assert flex.peak < flash.peak
