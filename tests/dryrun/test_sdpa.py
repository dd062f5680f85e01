"""`model.attn_implementation=sdpa` in a dry run: the kernels that a CUDA device takes, and what they keep."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from automodel_cli.dryrun.fake_device.sdpa import kernel
from automodel_cli.dryrun.types import RankResult, TraceRequest
from tests.dryrun.test_tiny import _BF16, _LAYERS, _PLAIN
from tests.dryrun.traces import trace_in_fork

pytestmark = pytest.mark.slow

_TOKENS, _HEADS, _MICROBATCHES = 2048, 4, 2
_DATA = (f"data.seq_len={_TOKENS}", "data.generator=null", "data.path=none.jsonl", "train.microbatch_size=1")
_MASK = 2 * _TOKENS**2  # bytes of one in bfloat16


@cache
def _traced(attention: str, document: int) -> RankResult:
    given = (
        *_PLAIN,
        *_BF16,
        *_DATA,
        f"model.attn_implementation={attention}",
        "parallelizer.activation_checkpointing=false",
    )
    options: dict[str, Any] = {"document": document, "microbatches": _MICROBATCHES}
    return trace_in_fork(TraceRequest("llama3_8b_tp2cp2_tiny", given, 1, **options))


def _launched(found: RankResult, of: str) -> int:
    return int(sum(line.count for line in found.kernels if of in line.what))


def test_packed_rows_keep_a_mask_of_16_bits_a_layer_and_no_scores_of_heads() -> None:
    masked, packed = (_traced(attention, 700) for attention in ("sdpa", "packed"))
    assert _launched(masked, "efficient_attention") == 2 * _LAYERS * _MICROBATCHES
    assert _launched(masked, "flash") == _launched(masked, "bmm") == 0
    more = masked.peak - packed.peak
    assert _LAYERS * _MASK <= more < (_LAYERS + 3) * _MASK, "besides, the mask as it came and one that is being made"
    assert masked.plan == pytest.approx(masked.peak, rel=0.10)
    pairs = 4 * _HEADS * 16 * _TOKENS**2 * _LAYERS * _MICROBATCHES
    assert masked.flops - packed.flops == pytest.approx(3.5 * pairs * (1 - _lower_half(700)), rel=1e-6)


def _lower_half(length: int) -> float:
    """Share of a row's pairs that documents of this length have."""
    rest = _TOKENS % length
    return ((_TOKENS // length) * length**2 + rest**2) / 2 / _TOKENS**2


def test_a_row_that_is_one_document_needs_no_mask_and_takes_the_flash_kernel() -> None:
    whole = _traced("sdpa", _TOKENS)
    assert _launched(whole, "scaled_dot_product_flash_attention") == 2 * _LAYERS * _MICROBATCHES
    assert _launched(whole, "efficient") == _launched(whole, "bmm") == 0
    assert whole.peak < _traced("packed", 700).peak + _MASK


@pytest.mark.parametrize(
    ("width", "value_width", "kv_heads", "dtype", "masked", "expected"),
    [
        (64, 64, 4, torch.bfloat16, False, "flash"),
        (64, 64, 2, torch.bfloat16, False, "flash"),
        (64, 64, 4, torch.bfloat16, True, "efficient"),
        (64, 64, 2, torch.bfloat16, True, None),
        (192, 128, 4, torch.bfloat16, False, "efficient"),
        (512, 512, 4, torch.bfloat16, False, "efficient"),
        (60, 60, 4, torch.bfloat16, False, None),
        (64, 64, 4, torch.float32, False, "efficient"),
        (64, 64, 4, torch.float64, False, None),
    ],
)
def test_the_kernel_is_the_one_that_sdp_utils_chooses(
    width: int, value_width: int, kv_heads: int, dtype: torch.dtype, masked: bool, expected: str | None
) -> None:
    query, key = (torch.empty(1, heads, 8, width, dtype=dtype, device="meta") for heads in (4, kv_heads))
    value = torch.empty(1, kv_heads, 8, value_width, dtype=dtype, device="meta")
    mask = torch.empty(1, 1, 8, 8, dtype=torch.bool, device="meta") if masked else None
    assert kernel(query, key, value, mask, kv_heads != 4) == expected
