"""Low-rank updates of expert weights, as two grouped GEMMs between rows that are sorted by expert.

The update of expert e is `scale * B_e A_e`. The product `B_e A_e` is never formed::

    forward    u = x A_e^T              y += scale * u B_e^T
    backward   q = scale * dy B_e       dx += q A_e,   dA_e = q^T x,   dB_e = dy^T (scale * u)

The adapters are parameters of the experts module, next to its weights, with the expert as first dimension. So they are
sharded, gathered and summed as the weights are.

Shapes: N rows, L experts, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

from automodel_cli.distributed import empty_groups

WEIGHTS = ("gate_up_proj", "down_proj")
MATRICES = ("lora_A", "lora_B")
ADAPTERS = tuple(f"{weight}_{matrix}" for weight in WEIGHTS for matrix in MATRICES)
"""Names of the parameters: A `[L, R, I]` and B `[L, O, R]` of each weight."""
SCALING = "lora_scaling"
"""Attribute of an experts module with adapters: a dict whose only value is the scale."""
_MULTIPLE = 8  # Grouped GEMMs need strides of 16 bytes.


def has_adapters(experts: nn.Module) -> bool:
    """Return whether the experts module has low-rank adapters."""
    return hasattr(experts, SCALING)


def scale_of(experts: nn.Module) -> float:
    """Return the scale of `B A`, 0 without adapters."""
    scaling: dict[str, float] = getattr(experts, SCALING, {})
    return next(iter(scaling.values()), 0.0)


def aligned(adapters: list[Tensor], rows: Tensor) -> list[Tensor]:
    """Return A and B of both weights in the dtype of `rows`, with a rank that grouped GEMMs support.

    Missing columns are zeros, which change neither the update nor the gradients of the others.
    """
    # Adapters may have another dtype than the rows. Grouped GEMMs need one dtype for rows and matrices.
    cast = [matrix.to(rows.dtype) for matrix in adapters]
    if not cast or (missing := -cast[0].shape[1] % _MULTIPLE) == 0:
        return cast
    # A is (L, R, I) and gets rows, B is (L, O, R) and gets columns. Rank 4 becomes 8 with 4 rows and columns of zeros.
    return [
        F.pad(matrix, (0, missing)) if i % 2 else F.pad(matrix, (0, 0, 0, missing)) for i, matrix in enumerate(cast)
    ]


def update(rows_NI: Tensor, pair: Sequence[Tensor], ends_L: Tensor, scale: float) -> Tensor:
    """Return the update of the outputs by A and B, `[N, O]`."""
    a_LRI, b_LOR = pair
    # (N, I) -> (N, R) -> (N, O). Cost per row: R (I + O) instead of I O. With I = O = 2048 and R = 16 that is 1/64.
    return grouped_mm(_inner(rows_NI, a_LRI, ends_L, scale), b_LOR.transpose(-2, -1), offs=ends_L)


def inner_gradient(grad_NO: Tensor, b_LOR: Tensor, ends_L: Tensor, scale: float) -> Tensor:
    """Return q, the gradient of `x A^T`, `[N, R]`."""
    return grouped_mm(grad_NO, b_LOR, offs=ends_L) * scale


def row_gradient(inner_grad_NR: Tensor, a_LRI: Tensor, ends_L: Tensor) -> Tensor:
    """Return the gradient of the rows through the update, `[N, I]`."""
    return grouped_mm(inner_grad_NR, a_LRI, offs=ends_L)


def matrix_gradients(
    rows_NI: Tensor,
    grad_NO: Tensor,
    inner_grad_NR: Tensor,
    a_LRI: Tensor,
    ends_L: Tensor,
    scale: float,
    rank: int,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of A and B. `rank`: number of columns that are parameters."""
    grad_a_LRI = empty_groups.weight_gradient(inner_grad_NR, rows_NI, ends_L)
    grad_b_LOR = empty_groups.weight_gradient(grad_NO, _inner(rows_NI, a_LRI, ends_L, scale), ends_L)
    # The padding is no parameter. Its gradients are dropped.
    return grad_a_LRI[:, :rank], grad_b_LOR[:, :, :rank]


def _inner(rows_NI: Tensor, a_LRI: Tensor, ends_L: Tensor, scale: float) -> Tensor:
    return grouped_mm(rows_NI, a_LRI.transpose(-2, -1), offs=ends_L) * scale
