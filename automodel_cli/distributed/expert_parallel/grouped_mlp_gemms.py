"""GEMMs and gate of the local experts of one module, with their gradients.

Shapes as in `grouped_mlp`: T tokens, N rows, L local experts, D hidden size, F columns of the first GEMM, I columns
after the gate.
"""

from __future__ import annotations

import copy
from typing import cast

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

from automodel_cli.distributed import empty_groups
from automodel_cli.distributed.expert_parallel import low_rank
from automodel_cli.distributed.expert_parallel.grouped_mlp_regions import GatedFamily, expert_regions
from automodel_cli.distributed.float8 import grouped_gemm
from automodel_cli.distributed.float8.quantization import Arithmetic
from automodel_cli.distributed.fusion.compiled_regions import RegionCompiler, fused
from automodel_cli.distributed.wgrad_fusion import gemm_timings
from automodel_cli.distributed.wgrad_fusion import grouped as wgrad_fusion_grouped
from automodel_cli.distributed.wgrad_fusion.linear import MainGrad

BIASES = tuple(f"{name}_bias" for name in low_rank.WEIGHTS)


class ExpertGemms:
    """Arithmetic of one experts module with `num_local` experts on this rank. `fp8`: compute GEMMs in float8."""

    def __init__(
        self,
        experts: nn.Module,
        num_local: int,
        group: dist.ProcessGroup | None,
        fuser: RegionCompiler | None = None,
        fp8: Arithmetic | None = None,
    ):
        self.transposed, self.num_local, self.group = bool(experts.is_transposed), num_local, group
        self._fp8 = fp8
        self.biased = set(BIASES) <= set(experts._parameters)
        family = copy.copy(experts)  # Attributes that the gate reads.
        family._parameters = {}
        self._family = cast(GatedFamily, family)
        # Each region runs uncompiled, or compiled by `fuser`.
        regions = expert_regions(self._family, self.biased)
        self._gate, self._through_gate = fused(regions.gate, fuser), fused(regions.through_gate, fuser)
        self.sum_of_pairs = fused(regions.sum_of_pairs, fuser)
        self.add_bias = fused(regions.add_bias, fuser if self.biased else None)

    def gate(self, inner_NF: Tensor, *bias: Tensor) -> Tensor:
        """Apply the gate, `[N, F]` -> `[N, I]`. `bias`: biases of the first GEMM `[L, F]` and the expert of each row
        `[N]`.
        """
        return self._gate(self._family, inner_NF, *bias)

    def through_gate(
        self, inner_NF: Tensor, grad_gated_NI: Tensor, weight_N1: Tensor, *bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Recompute the gate and return its backward.

        Args:
            inner_NF: result of the first GEMM, before the bias.
            grad_gated_NI: gradient of the unweighted result of the gate. Overwritten.
            weight_N1: routing weight of each row.

        Returns the weighted result of the gate `[N, I]`, the gradient of the routing weights `[N]` and the gradient of
        `inner_NF`.
        """
        return self._through_gate(self._family, inner_NF, grad_gated_NI, weight_N1, *bias)

    def product(self, rows_ND: Tensor, weight_LDF: Tensor, ends_L: Tensor, *, back: bool = False) -> Tensor:
        """Multiply every row by the weight of its expert. `back`: by the transposed weight, as backward needs."""
        if self._fp8 is not None and not self._fp8.paused:
            transposed = self.transposed is not back
            return grouped_gemm.grouped_gemm(
                self._fp8, rows_ND, weight_LDF, ends_L, transposed=transposed, fast=not back
            )
        weight = weight_LDF if self.transposed is not back else weight_LDF.transpose(-2, -1)
        return grouped_mm(rows_ND, weight, offs=ends_L)

    def weight_gradient(self, rows_NI: Tensor, grad_NO: Tensor, ends_L: Tensor) -> Tensor:
        first, second = (rows_NI, grad_NO) if self.transposed else (grad_NO, rows_NI)
        if self._fp8 is not None and not self._fp8.paused:
            return grouped_gemm.weight_gradient(self._fp8, first, second, ends_L)
        return empty_groups.weight_gradient(first, second, ends_L)

    def add_weight_gradient(self, rows_NI: Tensor, grad_NO: Tensor, count_L: list[int], main_grad: MainGrad) -> bool:
        """Accumulate the weight gradient into the main gradient, and return whether it was done.

        Done only if the main gradient supports it and one GEMM per expert is faster than a grouped one. Never with
        float8.
        """
        if self._fp8 is not None and not self._fp8.paused:
            return False
        weights = rows_NI.shape[1] * grad_NO.shape[1]
        if not gemm_timings.adds_faster(len(rows_NI) / len(count_L), weights):
            return False
        place = main_grad.place(rows_NI.dtype)
        if place is not None:
            first, second = (rows_NI, grad_NO) if self.transposed else (grad_NO, rows_NI)
            wgrad_fusion_grouped.add_grouped_(place[0], first, second, count_L, place[1])
        return place is not None


def parameters_of(experts: nn.Module) -> list[Tensor]:
    """Return the parameters in the order that `ExpertGemms` expects."""
    names = (*low_rank.WEIGHTS, *BIASES, *low_rank.ADAPTERS)
    return [param for name in names if (param := experts._parameters.get(name)) is not None]
