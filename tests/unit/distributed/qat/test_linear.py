"""Gradients of an adapter that is a part of the quantized weight, against an explicit straight-through in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from automodel_cli.distributed.qat.formats import fake_quantized, masked, token_scales, weight_scales
from automodel_cli.distributed.qat.linear import convert_to_qat
from automodel_cli.distributed.qat.settings import LowRank
from tests.unit.distributed.qat.test_formats import SCHEMES, fake, matrix, settings

SCALE = 1.5


@pytest.mark.parametrize(("name", "group", "activations"), SCHEMES)
def test_gradients_of_an_adapter_are_those_of_the_quantized_sum(name, group, activations):
    qat, generator = settings(name, group, activations), torch.Generator().manual_seed(1)
    layer = nn.Linear(96, 48)
    layer.weight = nn.Parameter(matrix(), requires_grad=False)
    a, b = (torch.randn(shape, generator=generator).requires_grad_() for shape in ((4, 96), (48, 4)))
    x, upstream = (torch.randn(shape, generator=generator) for shape in ((2, 5, 96), (2, 5, 48)))
    convert_to_qat(layer, qat)
    layer.adapter = lambda: LowRank(a, b, SCALE)
    y = layer(x)
    y.backward(upstream)

    wide_a, wide_b = (param.detach().double().requires_grad_() for param in (a, b))
    merged = layer.weight.double() + SCALE * wide_b @ wide_a
    value = merged.detach().float()
    codes = fake(value, qat.weights).double()
    scales = weight_scales(value, qat.weights, value.abs().amax())
    free = masked(torch.ones_like(value), value, qat.weights, scales).bool()
    weight = torch.where(free, merged - merged.detach() + codes, codes)
    of_x = None if activations is None else token_scales(x, qat.activations)
    read = x if of_x is None else fake_quantized(x, qat.activations, of_x, torch.float32)
    want = read.double() @ weight.t() + layer.bias.detach().double()
    want.backward(upstream.double())
    torch.testing.assert_close(y.double(), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(a.grad.double(), wide_a.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(b.grad.double(), wide_b.grad, rtol=1e-4, atol=1e-4)
    assert layer.weight.grad is None
