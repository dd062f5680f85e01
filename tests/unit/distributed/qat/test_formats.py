"""Fake quantization against torchao's, and its tensors against compressed-tensors."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from automodel_cli.distributed.qat import formats
from automodel_cli.distributed.qat.formats import Format, fake_quantized, token_scales, weight_scales
from automodel_cli.distributed.qat.linear import convert_to_qat
from automodel_cli.distributed.qat.settings import FakeQuantization
from automodel_cli.models.hub import compressed_tensors as files

SCHEMES = [
    ("int4", 32, None),
    ("int4", 32, "int8"),
    ("int4", 32, "fp8"),
    ("int8", None, None),
    ("int8", 16, None),
    ("int8", None, "int8"),
    ("fp8", None, None),
    ("fp8", None, "fp8"),
    ("mxfp4", 32, None),
    ("nvfp4", 16, None),
]


def matrix(rows=48, columns=96):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.05
    weight[3] = 0  # a row without a scale
    weight[:, 5] *= 40  # groups with an outlier
    return weight


def fake(weight, form, dtype=torch.float32):
    return fake_quantized(weight, form, weight_scales(weight, form, weight.float().abs().amax()), dtype)


def settings(name, group, activations, dtype=torch.float32):
    inputs = None if activations is None else Format(activations)
    return FakeQuantization(Format(name, group), inputs, compute_dtype=dtype, read_dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "group", "activations"), SCHEMES)
def test_compressed_tensors_reads_the_bits_that_the_forward_pass_computed_with(name, group, activations, dtype):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    qat, weight = settings(name, group, activations, dtype), matrix().to(dtype)
    stored = dict(files.compressed("layer.weight", weight, qat, weight.float().abs().amax(), dtype))
    theirs = QuantizationConfig.model_validate(files.quantization_config(qat))
    scheme = theirs.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(theirs.format)
    read = compressor.decompress({key.removeprefix("layer."): value for key, value in stored.items()}, scheme)
    assert torch.equal(read["weight"].to(dtype), fake(weight, qat.weights, dtype))


@pytest.mark.parametrize(("name", "group", "activations"), SCHEMES)
def test_codes_are_those_of_compressed_tensors_for_the_same_scales(name, group, activations):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize

    qat, weight = settings(name, group, activations), matrix()
    scheme = QuantizationConfig.model_validate(files.quantization_config(qat)).config_groups["group_0"]
    scales = weight_scales(weight, qat.weights, weight.abs().amax())
    whole = 1.0 if scales.of_tensor is None else scales.of_tensor
    theirs = fake_quantize(
        weight,
        scales.of_groups * whole,
        torch.zeros_like(scales.of_groups),
        scheme.weights,
        global_scale=scales.of_tensor,
    )
    assert (theirs - fake(weight, qat.weights)).abs().max() <= 2.0**-8 * weight.abs().max() * (group == 16)


@pytest.mark.parametrize(("name", "group"), [("int4", 32), ("int8", 96)])
def test_integers_and_their_gradients_are_those_of_torchao(name, group):
    pytest.importorskip("torchao")
    from torchao.quantization.qat.utils import _fake_quantize_per_channel_group
    from torchao.quantization.utils import get_group_qparams_symmetric

    form, weight = Format(name, group), matrix()
    bits = form.bits
    scales = weight_scales(weight, form)
    theirs, zeros = get_group_qparams_symmetric(weight, bits, group, torch.bfloat16)
    assert torch.equal(theirs.float(), scales.of_groups)

    param = weight.clone().requires_grad_()
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    out = _fake_quantize_per_channel_group(param, theirs.float(), zeros.float(), low, high, group)
    upstream = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    out.backward(upstream)
    ours = fake(weight, form)
    differ = (out != ours).sum()  # torchao multiplies by the reciprocal, so a tie may round to the other side
    assert differ <= 2
    assert (out - ours).abs().max() <= 1.001 * scales.of_groups.max()
    got = formats.masked(upstream, weight, form, scales)
    torch.testing.assert_close(got, param.grad)
    assert (got[4:] == 0).any()  # the largest weight of a group is clamped


def test_mxfp4_is_that_of_torchao():
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    weight = matrix()
    theirs = MXTensor.to_mx(weight, torch.float4_e2m1fn_x2, 32, ScaleCalculationMode.RCEIL).dequantize(torch.float32)
    assert torch.equal(theirs, fake(weight, Format("mxfp4", 32)))


def test_nvfp4_is_that_of_torchao():
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    weight = matrix()
    scale = per_tensor_amax_to_scale(weight.abs().amax())
    theirs = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=scale).dequantize(torch.float32)
    ours = fake(weight, Format("nvfp4", 16))
    near = (theirs - ours).abs() <= 2.0**-8 * theirs.abs()
    assert near.float().mean() > 0.95  # torchao keeps tiny scales at 2^-6 and does not read them in bfloat16


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_inputs_have_a_scale_for_each_token(name):
    x = matrix()[:8] * torch.logspace(-3, 3, 8)[:, None]
    read = fake_quantized(x, Format(name), token_scales(x, Format(name)), torch.float32)
    bound = x.abs().amax(-1, keepdim=True) / (127.5 if name == "int8" else 16)
    assert ((read - x).abs() <= bound).all()
    assert (read != x).any()


@pytest.mark.parametrize(("name", "group", "activations"), SCHEMES)
def test_a_layer_is_the_product_of_its_rounded_operands(name, group, activations):
    qat = settings(name, group, activations)
    layer, x = nn.Linear(96, 48), torch.randn(2, 5, 96)
    plain = nn.Linear(96, 48)
    plain.load_state_dict(layer.state_dict())
    convert_to_qat(layer, qat)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    layer(a).square().sum().backward()

    weight = fake(plain.weight.detach(), qat.weights).requires_grad_()
    read = (
        b
        if activations is None
        else b + (fake_quantized(x, qat.activations, token_scales(x, qat.activations), torch.float32) - b).detach()
    )
    torch.nn.functional.linear(read, weight, plain.bias).square().sum().backward()
    scales = weight_scales(plain.weight.detach(), qat.weights, plain.weight.detach().abs().amax())
    free = formats.masked(torch.ones_like(weight), plain.weight.detach(), qat.weights, scales)
    torch.testing.assert_close(layer.weight.grad, weight.grad * free)
    if activations is None:
        torch.testing.assert_close(a.grad, b.grad)

    qat.active = False
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_weights_are_rounded_to_the_compute_dtype_first():
    weight = matrix()
    qat = dataclasses.replace(settings("int4", 32, None), compute_dtype=torch.bfloat16)
    assert torch.equal(qat.rounded(weight), weight.bfloat16())
