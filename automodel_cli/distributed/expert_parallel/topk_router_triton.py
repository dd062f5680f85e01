"""Triton kernels of `topk_router`. Imports triton.

One program computes a few rows. Each row has all experts in registers, in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 2048  # Elements of the tile of a program.
_SMALLEST = 1e-20  # Added to the sum of weights, as in DeepSeek's code.


@triton.jit
def _scores(x, is_expert, sigmoid: tl.constexpr):
    if sigmoid:
        return tl.where(is_expert, 1.0 / (1.0 + tl.exp(-x)), 0.0)
    # Subtract the maximum first: exp overflows float32 above 88.
    e = tl.where(is_expert, tl.exp(x - tl.max(tl.where(is_expert, x, -float("inf")), 1)[:, None]), 0.0)
    return e / tl.sum(e, 1)[:, None]


@triton.jit
def _choose(
    logits, correction, weights, index, num_rows, num_experts, scale, smallest, choices: tl.constexpr,
    sigmoid: tl.constexpr, corrected: tl.constexpr, normalised: tl.constexpr, rows: tl.constexpr, padded: tl.constexpr,
    places: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * rows + tl.arange(0, rows))[:, None]
    expert, place = tl.arange(0, padded)[None, :], tl.arange(0, places)[None, :]
    is_expert = (expert < num_experts) & (row < num_rows)
    x = tl.load(logits + row.to(tl.int64) * num_experts + expert, mask=is_expert, other=0.0).to(tl.float32)
    s = _scores(x, is_expert, sigmoid)
    c = s + tl.load(correction + expert, mask=expert < num_experts, other=0.0).to(tl.float32) if corrected else s
    c = tl.where(c == c, c, -3e38)  # Select K experts even if scores are NaN.
    c = tl.where(expert < num_experts, c, -float("inf"))
    # K rounds of argmax instead of a sort: K is small, and the row stays in registers.
    picked, chosen = tl.zeros([rows, places], tl.float32), tl.zeros([rows, places], tl.int64)
    for k in tl.static_range(choices):
        best = tl.argmax(c, 1)[:, None]
        # Registers cannot be indexed. A sum over the row with one non-zero term reads `s` at `best`.
        picked = tl.where(place == k, tl.sum(tl.where(expert == best, s, 0.0), 1)[:, None], picked)
        chosen = tl.where(place == k, best.to(tl.int64), chosen)
        # Exclude the selected expert from the next rounds.
        c = tl.where(expert == best, -float("inf"), c)
    if normalised:
        picked = picked / (tl.sum(picked, 1)[:, None] + smallest)
    at = row.to(tl.int64) * choices + place
    is_choice = (place < choices) & (row < num_rows)
    tl.store(weights + at, (picked * scale).to(weights.dtype.element_ty), mask=is_choice)
    tl.store(index + at, chosen, mask=is_choice)


@triton.jit
def _back(
    grads, logits, index, result, num_rows, num_experts, scale, smallest, choices: tl.constexpr,
    sigmoid: tl.constexpr, normalised: tl.constexpr, rows: tl.constexpr, padded: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * rows + tl.arange(0, rows))[:, None]
    expert = tl.arange(0, padded)[None, :]
    is_expert = (expert < num_experts) & (row < num_rows)
    at = row.to(tl.int64) * num_experts + expert
    s = _scores(tl.load(logits + at, mask=is_expert, other=0.0).to(tl.float32), is_expert, sigmoid)
    is_chosen, g = tl.zeros([rows, padded], tl.int1), tl.zeros([rows, padded], tl.float32)
    for k in tl.static_range(choices):
        of_choice = row.to(tl.int64) * choices + k
        # Scatter of the K gradients to their experts, again without indexed registers.
        its = expert == tl.load(index + of_choice, mask=row < num_rows, other=0)
        is_chosen = is_chosen | its
        g = tl.where(its, tl.load(grads + of_choice, mask=row < num_rows, other=0.0).to(tl.float32), g)
    g = g * scale
    if normalised:
        total = tl.sum(tl.where(is_chosen, s, 0.0), 1)[:, None] + smallest
        g = tl.where(is_chosen, (g - tl.sum(g * s, 1)[:, None] / total) / total, 0.0)
    # Sigmoid: ds/dx = s (1 - s) for each expert. Softmax: experts outside the K also get a gradient, -s sum(g s).
    d = g * s * (1.0 - s) if sigmoid else s * (g - tl.sum(g * s, 1)[:, None])
    tl.store(result + at, d.to(result.dtype.element_ty), mask=is_expert)


def _tile(num_rows: int, num_experts: int) -> tuple[int, int, int]:
    padded = triton.next_power_of_2(num_experts)
    rows = max(1, _ELEMENTS // padded)
    return triton.cdiv(num_rows, rows), rows, padded


def choose(
    logits_NE: Tensor, correction_E: Tensor | None, choices: int, sigmoid: bool, normalised: bool, scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute the forward of `topk_router.route` on CUDA."""
    num_rows, num_experts = logits_NE.shape
    weight_NK = logits_NE.new_empty(num_rows, choices, dtype=dtype)
    index_NK = torch.empty(num_rows, choices, dtype=torch.int64, device=logits_NE.device)
    programs, rows, padded = _tile(num_rows, num_experts)
    if num_rows:
        _choose[(programs,)](
            logits_NE, logits_NE if correction_E is None else correction_E, weight_NK, index_NK, num_rows, num_experts,
            scale, _SMALLEST, choices, sigmoid, correction_E is not None, normalised, rows, padded,
            triton.next_power_of_2(choices),
        )  # fmt: skip
    return weight_NK, index_NK


def back(grad_NK: Tensor, logits_NE: Tensor, index_NK: Tensor, sigmoid: bool, normalised: bool, scale: float) -> Tensor:
    """Compute the backward of `topk_router.route` on CUDA.

    With g = grad * scale and total = sum of selected scores s, normalized weights give d/ds = (g - sum(g s) / total) /
    total for selected experts. The softmax then gives s (d - sum(d s)), the sigmoid d s (1 - s).
    """
    num_rows, num_experts = logits_NE.shape
    result_NE = torch.empty_like(logits_NE)
    programs, rows, padded = _tile(num_rows, num_experts)
    if num_rows:
        _back[(programs,)](
            grad_NK, logits_NE, index_NK, result_NE, num_rows, num_experts, scale, _SMALLEST, index_NK.shape[1],
            sigmoid, normalised, rows, padded,
        )  # fmt: skip
    return result_NE
