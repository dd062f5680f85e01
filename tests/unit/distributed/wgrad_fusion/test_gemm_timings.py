"""Which experts add gradients in products of their own: bundled models, worked out by hand for an H100."""

from __future__ import annotations

import pytest

from automodel_cli.distributed.wgrad_fusion.gemm_timings import adds_faster

_BYTES = 0.85 * 3.35e12  # a second


@pytest.mark.parametrize(
    ("rows", "weights", "alone", "grouped", "expected"),
    [
        # rows of an expert, its weights, shares of the peak that cuBLAS and the grouped product are measured to reach
        pytest.param(2048, 2880 * 5760, 0.72, 0.61, True, id="gpt-oss-20b, first weights"),
        pytest.param(2048, 2880 * 2880, 0.69, 0.61, True, id="gpt-oss-20b, second weights"),
        pytest.param(1536, 2048 * 2816, 0.56, 0.593, True, id="Moonlight, first weights"),
        pytest.param(1536, 2048 * 1408, 0.435, 0.593, False, id="Moonlight, second weights"),
        pytest.param(2048, 2048 * 1536, 0.50, 0.61, False, id="Qwen3-30B-A3B, first weights"),
        pytest.param(2048, 2048 * 768, 0.38, 0.61, False, id="Qwen3-30B-A3B, second weights"),
        pytest.param(8192, 7168 * 4096, 0.75, 0.644, True, id="DeepSeek-V3, first weights"),
        pytest.param(64, 64 * 64, 0.18, 0.54, False, id="a tiny one"),
    ],
)
def test_a_product_that_adds_is_taken_where_it_saves_more_than_its_launch(
    rows: int, weights: int, alone: float, grouped: float, expected: bool
) -> None:
    at_peak, traffic = 2 * rows * weights / 989e12, 8 * weights / _BYTES
    adding = max(at_peak / alone, traffic) + min(at_peak / alone, traffic) / 2
    saved = at_peak / grouped + 10 * weights / _BYTES - adding
    assert (saved > 5e-6) == expected == adds_faster(rows, weights)
