"""Triton kernels over one chunk of logits, called by `kernels.py`. Imports triton.

Each program processes one row. It converts logits to `z = multiplier * x`, or `z = multiplier * cap * tanh(x / cap)`,
in fp32 registers. z is never stored in memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _tanh(x):
    t = tl.exp(-2.0 * tl.abs(x))
    return tl.where(x < 0, -1.0, 1.0) * (1.0 - t) / (1.0 + t)


@triton.jit
def _statistics(
    logits, columns, lse, picked, entropies, multiplier, cap, vocabulary: tl.constexpr,
    num_columns: tl.constexpr, capped: tl.constexpr, entropy: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    # Online softmax. For the running maximum m: total = sum exp(z - m), moment = sum exp(z - m) (z - m).
    # Then the log-sum-exp is m + log(total) and the entropy is log(total) - moment / total.
    largest, total, moment = -1e30, 0.0, 0.0
    for start in range(0, vocabulary, block):
        at = start + tl.arange(0, block)
        x = tl.load(logits + at, mask=at < vocabulary, other=0.0).to(tl.float32)
        z = multiplier * (cap * _tanh(x / cap) if capped else x)
        z = tl.where(at < vocabulary, z, -float("inf"))
        new = tl.maximum(largest, tl.max(z, 0))
        # A larger maximum shrinks the earlier sums. Example: blocks (0, 0) and (ln 4). After the first: m = 0, total =
        # 2. Then m = ln 4, shrunk = 1/4, total = 2/4 + 1 = 1.5, and the log-sum-exp is ln 4 + ln 1.5 = ln 6.
        shrunk, e = tl.exp(largest - new), tl.exp(z - new)
        if entropy:
            moment = shrunk * (moment + total * (largest - new)) + tl.sum(tl.where(e > 0, e * (z - new), 0.0), 0)
        total = shrunk * total + tl.sum(e, 0)
        largest = new
    tl.store(lse + row, largest + tl.log(total))
    if entropy:
        tl.store(entropies + row, tl.log(total) - moment / total)
    for n in tl.static_range(num_columns):
        column = tl.load(columns + row * num_columns + n)
        # A column of -1 (other rank, no token) loads a valid address, and is replaced by 0 below.
        x = tl.load(logits + tl.maximum(column, 0)).to(tl.float32)
        z = multiplier * (cap * _tanh(x / cap) if capped else x)
        tl.store(picked + row * num_columns + n, tl.where(column >= 0, z, 0.0))


@triton.jit
def _gradient(
    logits, columns, grads, lse, totals, entropies, grad_entropies, multiplier, cap, vocabulary: tl.constexpr,
    num_columns: tl.constexpr, capped: tl.constexpr, entropy: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocabulary
    # Writing over the logits is safe: each program reads and writes its own row only, block by block.
    row_lse, factor = tl.load(lse + row), tl.load(totals + row)
    for start in range(0, vocabulary, block):
        at = start + tl.arange(0, block)
        x = tl.load(logits + at, mask=at < vocabulary, other=0.0).to(tl.float32)
        slope = multiplier
        if capped:
            t = _tanh(x / cap)
            logp, slope = multiplier * cap * t - row_lse, multiplier * (1.0 - t * t)
        else:
            logp = multiplier * x - row_lse
        if entropy:
            e = tl.load(grad_entropies + row)
            d = -tl.exp(logp) * (factor + e * (logp + tl.load(entropies + row)))
        else:
            d = -tl.exp(logp) * factor
        for n in tl.static_range(num_columns):
            column = tl.load(columns + row * num_columns + n)
            d += tl.where(at == column, tl.load(grads + row * num_columns + n), 0.0)
        tl.store(logits + at, (d * slope).to(logits.dtype.element_ty), mask=at < vocabulary)


def statistics(
    logits_sV: Tensor, columns_sN: Tensor, multiplier: float, cap: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.statistics`."""
    rows, vocabulary = logits_sV.shape
    lse_s = torch.empty(rows, dtype=torch.float32, device=logits_sV.device)
    picked_sN = torch.empty(columns_sN.shape, dtype=torch.float32, device=logits_sV.device)
    entropy_s = torch.empty_like(lse_s) if entropy else lse_s.new_empty(0)
    if rows:
        _statistics[(rows,)](
            logits_sV, columns_sN, lse_s, picked_sN, entropy_s, multiplier, cap, vocabulary,
            columns_sN.shape[1], cap > 0, entropy, _BLOCK, num_warps=8,
        )  # fmt: skip
    return lse_s, picked_sN, entropy_s


def gradient_(
    logits_sV: Tensor,
    columns_sN: Tensor,
    grad_sN: Tensor,
    lse_s: Tensor,
    total_s: Tensor,
    entropy_s: Tensor,
    grad_entropy_s: Tensor,
    multiplier: float,
    cap: float,
) -> None:
    """See `kernels.gradient_`."""
    rows, vocabulary = logits_sV.shape
    if rows:
        _gradient[(rows,)](
            logits_sV, columns_sN, grad_sN, lse_s, total_s, entropy_s, grad_entropy_s, multiplier, cap, vocabulary,
            columns_sN.shape[1], cap > 0, len(entropy_s) > 0, _BLOCK, num_warps=8,
        )  # fmt: skip
