"""Fake quantization of the fused weights of experts: each row of each expert as that of a linear layer.

Shapes: L experts, O outputs, I inputs. A family may store `[L, I, O]`, which is `transposed`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from automodel_cli.distributed.qat.formats import fake_quantized, masked, weight_scales
from automodel_cli.distributed.qat.settings import FakeQuantization


def quantized_weight(weight: Tensor, qat: FakeQuantization, *, transposed: bool) -> Tensor:
    """Return the weight as the forward pass multiplies with it, stored as it is."""
    rounded_LOI = _by_outputs(qat.rounded(weight), transposed)
    read_LOI = fake_quantized(rounded_LOI, qat.weights, weight_scales(rounded_LOI, qat.weights), qat.read_dtype)
    return _stored(read_LOI.to(weight.dtype), transposed)


def masked_gradient(gradient: Tensor, weight: Tensor, qat: FakeQuantization, *, transposed: bool) -> Tensor:
    """Return the straight-through gradient of the weight, 0 where its code is clamped."""
    if not qat.weights.is_integer:
        return gradient
    rounded_LOI = _by_outputs(qat.rounded(weight), transposed)
    scales = weight_scales(rounded_LOI, qat.weights)
    return gradient * _stored(masked(torch.ones_like(rounded_LOI), rounded_LOI, qat.weights, scales), transposed)


def _by_outputs(weight: Tensor, transposed: bool) -> Tensor:
    return weight.transpose(-2, -1).contiguous() if transposed else weight


def _stored(weight_LOI: Tensor, transposed: bool) -> Tensor:
    return weight_LOI.transpose(-2, -1) if transposed else weight_LOI
