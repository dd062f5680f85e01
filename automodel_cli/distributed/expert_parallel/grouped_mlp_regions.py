"""Fusible regions of gated MLP experts: gate, backward of the gate, bias, and weighted sum over experts.

Shapes as in `grouped_mlp`: T tokens, K experts per token, P = T x K pairs, N rows, L local experts, D hidden size, F
columns of the first GEMM, I columns after the gate.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from automodel_cli.distributed.fusion.compiled_regions import FusibleRegion


class GatedFamily(Protocol):
    """An experts module of transformers, which defines the gate."""

    def _apply_gate(self, inner_NF: Tensor) -> Tensor: ...


def add_expert_bias(rows_NF: Tensor, bias_LF: Tensor, expert_N: Tensor) -> Tensor:
    """Add the bias of its expert to each row."""
    return rows_NF + bias_LF.index_select(0, expert_N)


def _gate(family: GatedFamily, inner_NF: Tensor, *bias: Tensor) -> Tensor:
    return family._apply_gate(add_expert_bias(inner_NF, *bias) if bias else inner_NF)


def _through_gate(
    family: GatedFamily, inner_NF: Tensor, grad_gated_NI: Tensor, weight_N1: Tensor, *bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    # y = w down g(x) gives dw = <down^T dy, g(x)> and dx = g'(x) (w down^T dy), with grad_gated_NI = down^T dy.
    if bias:
        inner_NF = add_expert_bias(inner_NF, *bias)
    # The gate runs again here, because its (N, I) result is not saved. One pass over `inner_NF` is cheaper than its
    # memory.
    gated_NI, back = torch.func.vjp(family._apply_gate, inner_NF)  # type: ignore[misc]  # two, without `has_aux`
    grad_weight_N = (grad_gated_NI * gated_NI).sum(-1, dtype=weight_N1.dtype)
    # `out` keeps the dtype of the rows. A float32 weight times bfloat16 rows would promote the result to float32.
    weighted_NI = torch.mul(gated_NI, weight_N1, out=torch.empty_like(gated_NI))
    # `grad_gated_NI` is overwritten. Its unweighted values were needed for `grad_weight_N` only.
    (grad_inner_NF,) = back(grad_gated_NI.mul_(weight_N1))
    return weighted_NI, grad_weight_N, grad_inner_NF


def _sum_of_pairs(result_PD: Tensor, place_P: Tensor, weight_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum weighted results of sorted pairs by token, `[T, D]`. Rounds as transformers does."""
    # (P, D) in expert order -> (P, D) in token order -> (T, K, D).
    result_TKD = result_PD.index_select(0, place_P).view(*weight_TK.shape, -1)
    return (result_TKD * weight_TK.unsqueeze(-1)).sum(1).to(dtype)


class ExpertRegions(NamedTuple):
    """Regions that can be fused. Without biases, `add_bias` is not called."""

    gate: FusibleRegion[Tensor]
    through_gate: FusibleRegion[tuple[Tensor, Tensor, Tensor]]
    sum_of_pairs: FusibleRegion[Tensor]
    add_bias: FusibleRegion[Tensor]


def expert_regions(family: GatedFamily, biased: bool) -> ExpertRegions:
    """Return the regions of experts whose gate is that of `family`."""
    kind, width, generator = type(family).__name__, 16, torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def bias(rows: int) -> tuple[Tensor, ...]:
        return numbers(3, width), torch.arange(rows) % 3

    def gate_sample(rows: int) -> tuple[object, ...]:
        return family, numbers(rows, width), *(bias(rows) if biased else ())

    def through_sample(rows: int) -> tuple[object, ...]:
        inner_NF = numbers(rows, width)
        grad_gated_NI = numbers(*family._apply_gate(inner_NF).shape)
        return family, inner_NF, grad_gated_NI, numbers(rows, 1).abs(), *(bias(rows) if biased else ())

    def sum_sample(rows: int) -> tuple[object, ...]:
        place_P = torch.randperm(2 * rows, generator=generator)
        return numbers(2 * rows, width), place_P, numbers(rows, 2).abs(), torch.float32

    return ExpertRegions(
        FusibleRegion(f"gate {kind}", _gate, None, gate_sample),
        FusibleRegion(f"backward of gate {kind}", _through_gate, None, through_sample),
        FusibleRegion("sum over experts", _sum_of_pairs, None, sum_sample),
        FusibleRegion("bias of experts", add_expert_bias, None, lambda rows: (numbers(rows, width), *bias(rows))),
    )
