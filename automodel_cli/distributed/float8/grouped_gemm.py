"""Grouped GEMMs of experts in float8.

Operands are cast along the contracted dimension (`quantization`)::

    y = x W_e (contracts inputs)    dx = dy W_e^T (contracts outputs)    dW_e = x^T dy (contracts tokens of expert e)

Scales: one per row of x and dy, one per output of each expert, and one per feature and expert for the last GEMM. The
last GEMM contracts tokens. Tensor cores need the rows of each expert to start at a multiple of 16, so the cast pads
them with zeros (`group_cast`).

Recipes and numbers are those of torchao for mixtures of experts (BSD-3-Clause; `torchao.prototype.moe_training`). One
difference: only forward GEMMs may accumulate in less than float32, as in linear layers.

Shapes: N rows sorted by expert with ends `ends_L` (int32), L local experts, K contracted, O other features. I and O of
a weight gradient. P padded rows.
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
from automodel_cli.distributed import empty_groups
from automodel_cli.distributed.float8 import group_cast
from automodel_cli.distributed.float8.quantization import (
    Arithmetic,
    Float8Recipe,
    Operand,
    dequantize_operand,
    require_float8,
)

GENERATIONS = (9, 10)
"""Major compute capabilities with kernels for torch's grouped float8 GEMM."""


def why_unsupported(recipe: Float8Recipe) -> str:
    """Return why experts do not support this recipe. Empty if they do."""
    one_for_each_row = recipe.by_row and not recipe.blocks
    return "" if one_for_each_row else f"whose products have a scale for each row, as {recipe.name} has not"


def arithmetic_of(experts: nn.Module) -> Arithmetic | None:
    """Return the float8 arithmetic of an experts module, or None."""
    return getattr(experts, "fp8", None)


def require_grouped(device: torch.device, recipe: Float8Recipe) -> None:
    """Raise ConfigError if grouped float8 GEMMs do not run on `device`."""
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
    fp8: Arithmetic, rows_NK: Tensor, weight: Tensor, ends_L: Tensor, *, transposed: bool, fast: bool = False
) -> Tensor:
    """Multiply every row by the weight of its expert, `[N, O]`.

    Args:
        weight: `[L, O, K]`, or `[L, K, O]` if `transposed`.
        fast: see `quantization.Arithmetic.product`.
    """
    rows, weights = fp8.operand(rows_NK), fp8.operand(weight, transposed=transposed)
    if fp8.emulate:
        a_NK, b_LOK = dequantize_operand(rows, torch.float32), dequantize_operand(weights, torch.float32)
        return grouped_mm(a_NK, b_LOK.transpose(-2, -1), offs=ends_L).to(rows_NK.dtype)
    return _scaled(rows, weights, ends_L, fast=fast).to(rows_NK.dtype)


def weight_gradient(fp8: Arithmetic, first_NI: Tensor, second_NO: Tensor, ends_L: Tensor) -> Tensor:
    """Return first^T second of the rows of each expert, `[L, I, O]`."""
    if fp8.recipe.exact_weight_gradient:
        return empty_groups.weight_gradient(first_NI, second_NO, ends_L)
    return empty_groups.with_zeros(
        functools.partial(_weight_gradient, fp8), first_NI, second_NO, ends_L, name=fp8.recipe.name
    )


def _weight_gradient(fp8: Arithmetic, first_NI: Tensor, second_NO: Tensor, ends_L: Tensor) -> Tensor:
    # The summed dimension is tokens, so scales are per expert and column, and each expert's rows are padded to a
    # multiple.
    first_IP, inverse_LI, padded_ends_L = group_cast.cast_groups(first_NI, ends_L)
    second_OP, inverse_LO, _ = group_cast.cast_groups(second_NO, ends_L)
    if fp8.emulate:
        sums_LIO = grouped_mm(first_IP.float(), second_OP.float().t(), offs=padded_ends_L)
        grad_LIO: Tensor = (sums_LIO * inverse_LI[:, :, None] * inverse_LO[:, None, :]).to(first_NI.dtype)
        return grad_LIO
    first, second = Operand(first_IP, inverse_LI.flatten()), Operand(second_OP, inverse_LO.flatten())
    return _scaled(first, second, padded_ends_L, fast=False).to(first_NI.dtype)


def _scaled(a: Operand, b: Operand, ends_L: Tensor, *, fast: bool) -> Tensor:
    """Return bfloat16, the only output dtype of the kernels."""
    result: Tensor = scaled_grouped_mm(
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
    return result
