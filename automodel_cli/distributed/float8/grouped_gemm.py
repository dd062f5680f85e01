"""Grouped products of experts in 8-bit floats, as `fp8` casts: rows of tokens and weights along what is contracted.

    y = x W_e (over the inputs)      dx = dy W_e^T (over the outputs)      dW_e = x^T dy (over the tokens of expert e)

Rows have a scale each, so do the outputs of each expert, and in the third product the features of each expert's tokens.
That one contracts tokens: tensor cores want each expert's to begin at a multiple of 16, so the casts put zeros between
them (`fp8_groups`). Recipes and numbers are torchao's for mixtures of experts (BSD-3-Clause;
`torchao.prototype.moe_training`), except that only forward products may add in less than float32, as in linear layers.

Shapes: N rows by expert, which ends at `ends_L` (int32), L experts here; K contracted, O the other features; I and O of
a weight's gradient; P rows with zeros between.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn.functional import (  # type: ignore[attr-defined]  # torch's stubs lack the last
    ScalingType,
    grouped_mm,
    scaled_grouped_mm,
)

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.expert_parallel import empty_groups
from automodel_cli.distributed.float8 import group_cast
from automodel_cli.distributed.float8.quantization import (
    Arithmetic,
    Float8Recipe,
    Operand,
    dequantize_operand,
    require_float8,
)

GENERATIONS = (9, 10)
"""Major compute capabilities that torch's grouped product of 8-bit floats has kernels for."""


def why_unsupported(recipe: Float8Recipe) -> str:
    """Why experts have no products in this recipe; empty where they do."""
    one_for_each_row = recipe.by_row and not recipe.blocks
    return "" if one_for_each_row else f"whose products have a scale for each row, as {recipe.name} has not"


def arithmetic_of(experts: nn.Module) -> Arithmetic | None:
    """How a module of experts multiplies, where that is in 8-bit floats."""
    return getattr(experts, "fp8", None)


def require_grouped(device: torch.device, recipe: Float8Recipe) -> None:
    """Raise ConfigError where experts' products do not run."""
    require_float8(device, recipe)
    capability = torch.cuda.get_device_capability()
    if capability[0] not in GENERATIONS:
        has = ".".join(map(str, capability))
        raise ConfigError(
            "model.fp8.experts=true needs a GPU of compute capability 9 or 10 (H100, B200), because torch has "
            f"grouped float8 GEMMs for no other GPU, but {torch.cuda.get_device_name()} has {has}",
            code="hardware_required",
            keys=("model.fp8.experts",),
            fix="model.fp8.experts=false",
        )


def grouped_gemm(
    fp8: Arithmetic, rows_NK: Tensor, weight: Tensor, ends_L: Tensor, *, turned: bool, fast: bool = False
) -> Tensor:
    """[N, O]: every row times its expert's `weight`, [L, O, K], or [L, K, O] where it is `turned`. `fast`: see
    `fp8.Arithmetic.product`."""
    rows, weights = fp8.operand(rows_NK), fp8.operand(weight, turned=turned)
    if fp8.emulate:
        a_NK, b_LOK = dequantize_operand(rows, torch.float32), dequantize_operand(weights, torch.float32)
        return grouped_mm(a_NK, b_LOK.transpose(-2, -1), offs=ends_L).to(rows_NK.dtype)
    return _scaled(rows, weights, ends_L, fast=fast).to(rows_NK.dtype)


def weight_gradient(fp8: Arithmetic, first_NI: Tensor, second_NO: Tensor, ends_L: Tensor) -> Tensor:
    """[L, I, O]: of each expert the sum over its rows of first times second."""
    if fp8.recipe.exact_weight_gradient:
        return empty_groups.weight_gradient(first_NI, second_NO, ends_L)
    return empty_groups.with_zeros(
        functools.partial(_weight_gradient, fp8), first_NI, second_NO, ends_L, name=fp8.recipe.name
    )


def _weight_gradient(fp8: Arithmetic, first_NI: Tensor, second_NO: Tensor, ends_L: Tensor) -> Tensor:
    first_IP, inverse_LI, padded_ends_L = group_cast.cast_groups(first_NI, ends_L)
    second_OP, inverse_LO, _ = group_cast.cast_groups(second_NO, ends_L)
    if fp8.emulate:
        sums_LIO = grouped_mm(first_IP.float(), second_OP.float().t(), offs=padded_ends_L)
        return (sums_LIO * inverse_LI[:, :, None] * inverse_LO[:, None, :]).to(first_NI.dtype)
    first, second = Operand(first_IP, inverse_LI.flatten()), Operand(second_OP, inverse_LO.flatten())
    return _scaled(first, second, padded_ends_L, fast=False).to(first_NI.dtype)


def _scaled(a: Operand, b: Operand, ends_L: Tensor, *, fast: bool) -> Tensor:
    """In bfloat16, the one result that the kernels have."""
    return scaled_grouped_mm(
        a.values_MK,
        b.values_MK.transpose(-2, -1),
        a.inverse.squeeze(-1),
        ScalingType.RowWise,
        b.inverse.squeeze(-1),
        ScalingType.RowWise,
        offs=ends_L,
        output_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )
