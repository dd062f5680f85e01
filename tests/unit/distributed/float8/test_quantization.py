"""Linear layers in 8-bit floats against the formula written out here, torchao's own, and torch's product of casts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.float8 import linear as float8_linear
from automodel_cli.distributed.float8 import mxfp8
from automodel_cli.distributed.float8.quantization import RECIPES, Arithmetic, require_float8
from automodel_cli.distributed.fusion import compiled_regions
from tests.errors import raises

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOKENS, INPUTS, OUTPUTS = 32, 96, 64
BY_ROW = [name for name, recipe in RECIPES.items() if not recipe.blocks]


def layer(recipe: str, *, emulate: bool = True, bias: bool = False, dtype=torch.float32):
    torch.manual_seed(0)
    linear = nn.Linear(INPUTS, OUTPUTS, bias=bias).to(dtype)
    with torch.no_grad():  # rows of very different size, one of them zero
        linear.weight *= torch.logspace(-4, 3, OUTPUTS)[:, None].to(dtype)
        linear.weight[7] = 0
    float8_linear.convert_to_float8(linear, Arithmetic(RECIPES[recipe], emulate))
    return linear


def numbers(tokens: int = TOKENS, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, INPUTS, generator=generator) * torch.logspace(-3, 2, tokens)[:, None]
    return x.to(dtype), torch.randn(tokens, OUTPUTS, generator=generator).to(dtype)


def run(linear, x, grad):
    x = x.clone().requires_grad_()
    y = linear(x)
    y.backward(grad)
    return y.detach(), x.grad, linear.weight.grad


def cast_one_by_one(values, most, dtype, power_of_two):
    """Numbers that share a scale, by the definition: in Python's floats, each rounded by torch's cast."""
    largest = max(max(abs(v) for v in values), 1e-12)
    scale = torch.tensor(most / largest, dtype=torch.float32).item()
    if power_of_two:
        scale = 2.0 ** (math.frexp(scale)[1] - 1)
    return [torch.tensor(v * scale).clamp(-most, most).to(dtype).float().item() / scale for v in values]


def cast_reference(matrix, dtype, power_of_two, *, by_row):
    most = {E4M3: 448.0, E5M2: 57344.0}[dtype]
    rows = matrix.tolist()
    if by_row:
        return torch.tensor([cast_one_by_one(row, most, dtype, power_of_two) for row in rows], dtype=torch.float64)
    flat = cast_one_by_one(list(itertools.chain(*rows)), most, dtype, power_of_two)
    return torch.tensor(flat, dtype=torch.float64).view(matrix.shape)


def by_definition(recipe, weight, x, grad):
    def cast(matrix, dtype=E4M3, by_row=recipe != "tensorwise"):
        return cast_reference(matrix, dtype, recipe != "tensorwise", by_row=by_row)

    if recipe == "mxfp8":
        y, grad_x = in_blocks(x) @ in_blocks(weight).t(), in_blocks(grad) @ in_blocks(weight.t()).t()
        return y, grad_x, in_blocks(grad.t()) @ in_blocks(x.t()).t()
    of_gradient = E5M2 if recipe == "tensorwise" else E4M3
    y = cast(x) @ cast(weight).t()
    if recipe == "rowwise_with_gw_hp":
        return y, cast(grad) @ cast(weight, by_row=False), grad.double().t() @ x.double()
    grad_x = cast(grad, of_gradient) @ cast(weight.t()).t()
    return y, grad_x, cast(grad.t(), of_gradient) @ cast(x.t()).t()


def in_blocks(matrix):
    """MXFP8 by its definition, in Python's floats: 2^e is the least with which no number of the block exceeds 448."""
    found = []
    for row in matrix.tolist():
        row += [0.0] * (-len(row) % 32)
        for block in zip(*[iter(row)] * 32, strict=True):
            largest = max(map(abs, block))
            fraction, exponent = math.frexp(torch.tensor(largest / 448, dtype=torch.float32).item())
            scale = 2.0 ** -(exponent - (fraction == 0.5)) if largest else 1.0
            found += [torch.tensor(v * scale).clamp(-448, 448).to(E4M3).double().item() / scale for v in block]
    return torch.tensor(found, dtype=torch.float64).view(len(matrix), -1)


def error(got, want):
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


@pytest.mark.parametrize("recipe", RECIPES)
def test_forward_and_both_gradients_are_those_of_the_definition(recipe):
    linear = layer(recipe)
    x, grad = numbers()
    for got, want in zip(run(linear, x, grad), by_definition(recipe, linear.weight.detach(), x, grad), strict=True):
        assert error(got, want) < 1e-6
        assert error(got[:4], want[:4]) < 1e-6, "small rows too"


@pytest.mark.parametrize("recipe", BY_ROW)
def test_the_numbers_are_torchaos(recipe):
    float8 = pytest.importorskip("torchao.float8")
    from torchao.float8.float8_linear import Float8Linear

    for dtype in (torch.float32, torch.bfloat16):
        linear = layer(recipe, bias=True, dtype=dtype)
        config = float8.Float8LinearConfig.from_recipe_name(recipe)
        object.__setattr__(config, "emulate", True)
        theirs = nn.Linear(INPUTS, OUTPUTS).to(dtype)
        theirs.load_state_dict(linear.state_dict())
        theirs = Float8Linear.from_float(theirs, config)
        x, grad = numbers(dtype=dtype)
        for got, want in zip(run(linear, x, grad), run(theirs, x, grad), strict=True):
            same = torch.equal(got, want)  # theirs divides by the scale, which rounds unless it is a power of two
            assert same or (recipe == "tensorwise" and error(got, want) < torch.finfo(dtype).eps * 8)


def test_blocks_and_layers_of_mxfp8_are_torchaos():
    """Exponents and numbers to the last bit, in its RCEIL mode, tiles too; products as its emulation adds them up."""
    formats = pytest.importorskip("torchao.prototype.mx_formats")
    from torchao.prototype.moe_training.mxfp8_linear import KernelPreference, MXFP8Linear
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.utils import to_blocked

    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(160, 192, generator=torch.Generator().manual_seed(0)) * torch.logspace(-38, 30, 192)
        x[3] = 0
        x[5, 40], x[6, 70] = math.inf, math.nan
        x = x.to(dtype)
        scale, values = to_mx(x, E4M3, 32, formats.ScaleCalculationMode.RCEIL)
        for tiled, theirs in ((False, scale), (True, to_blocked(scale.view(torch.uint8)))):
            ours, exponents = mxfp8.cast_mxfp8(x, False, tiled)
            assert torch.equal(exponents.view(torch.uint8), theirs.view(torch.uint8))
            assert torch.equal(ours.view(torch.uint8), values.view(torch.uint8))
        ours = layer("mxfp8", dtype=dtype)
        options = {"device": "cpu", "dtype": dtype, "bias": False}
        theirs = MXFP8Linear(INPUTS, OUTPUTS, kernel_preference=KernelPreference.EMULATED, **options)
        theirs.load_state_dict(ours.state_dict())
        x, grad = numbers(dtype=dtype)
        for got, want in zip(run(ours, x, grad), run(theirs, x, grad), strict=True):
            assert error(got, want) <= torch.finfo(dtype).eps * 2


def test_exponents_round_up_as_the_instruction_does_next_to_a_power_of_two():
    """torchao's emulation takes a logarithm, which does not tell 1 + 2^-23 from 1."""
    largest = torch.tensor([[448.0], [448 * (1 + 2.0**-23)], [2.0**-130 * 448], [0.0]]) * torch.ones(32)
    _, scale = mxfp8.cast_mxfp8(largest, False, False)
    assert scale.view(torch.uint8).flatten().tolist() == [127, 128, 0, 0]


@pytest.mark.parametrize("recipe", BY_ROW)
@pytest.mark.parametrize("tokens", [TOKENS, 19])
def test_torchs_product_of_casts_takes_what_it_is_given_and_agrees(recipe, tokens):
    """The operator that runs on a GPU has a CPU kernel too, with its own check of shapes and scales; bf16 comes out. A
    number of tokens that is no multiple of 16 is padded where it is summed over."""
    x, grad = numbers(tokens)
    emulated, real = (run(layer(recipe, emulate=emulate), x, grad) for emulate in (True, False))
    for got, want in zip(real, emulated, strict=True):
        assert torch.allclose(got, want, rtol=2**-7, atol=2**-8 * want.abs().max().item() * 1e-2)
    on_meta = layer(recipe, emulate=False).to("meta")
    fakes = run(on_meta, x.to("meta"), grad.to("meta"))  # where CUDA's rules of layouts and sizes are checked
    assert [fake.shape for fake in fakes] == [one.shape for one in real]


def test_torchs_product_of_blocks_takes_what_it_is_given():
    """A CPU has none; on meta tensors CUDA's rules of sizes, layouts and tiles are checked."""
    x, grad = (rows.to("meta") for rows in numbers(19))
    fakes = run(layer("mxfp8", emulate=False).to("meta"), x, grad)
    assert [fake.shape for fake in fakes] == [(19, OUTPUTS), (19, INPUTS), (OUTPUTS, INPUTS)]


def test_only_what_is_needed_is_kept_and_multiplied():
    linear = layer("rowwise")
    x, _ = numbers()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        linear(x)  # inputs of the first layer want no gradient
        linear.requires_grad_(False)
        linear(x.requires_grad_())
    assert kept == [x.shape, linear.weight.shape]
    linear(x).sum().backward()
    assert linear.weight.grad is None and x.grad is not None


def test_paused_layers_compute_what_their_weights_say():
    linear = layer("rowwise", bias=True)
    x, _ = numbers()
    cast, exact = linear(x), nn.functional.linear(x, linear.weight, linear.bias)
    with float8_linear.paused([nn.Sequential(linear)]):
        assert torch.equal(linear(x), exact)
    assert torch.equal(linear(x), cast) and not torch.equal(cast, exact)


def test_what_is_not_finite_stays_visible():
    linear = layer("rowwise")
    x, _ = numbers()
    x[3, 5], x[4, 6] = math.inf, math.nan
    y = linear(x)
    assert not y[3].isfinite().all() and not y[4].isfinite().all() and y[5:].isfinite().all()


@pytest.mark.parametrize("recipe", ["rowwise", pytest.param("mxfp8", marks=pytest.mark.slow)])
def test_casts_are_elementwise_and_compile_to_the_same_bits(recipe):
    x, grad = numbers()
    want = run(layer(recipe), x, grad)
    linear = layer(recipe)
    fuser = compiled_regions.Compiled("aot_eager", torch.device("cpu"), torch.float32)
    float8_linear.exclude_indivisible(linear, torch.device("cpu"), fuser)
    assert not fuser.rejected, str(fuser)
    for tokens in (TOKENS, 21):
        before = len(compiled_regions.compilations)
        got = run(linear, *(t[:tokens] for t in (x, grad)))
        linear.zero_grad()
        if tokens == TOKENS:
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert len(compiled_regions.compilations) == before, "other numbers of tokens are the same graphs"


def test_autocast_decides_what_the_layer_gives_and_not_what_it_adds_in():
    linear = layer("rowwise", bias=True)
    x, _ = numbers()
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
    assert y.dtype == torch.bfloat16
    half = layer("rowwise", bias=True).bfloat16()
    assert torch.equal(y, half(x.bfloat16()))


def test_devices_without_such_products_are_refused_by_name(monkeypatch):
    rowwise, blocks = RECIPES["rowwise"], RECIPES["mxfp8"]
    with raises(ConfigError, "hardware_required", keys=("model.fp8",), values=("8.9", "cpu")):
        require_float8(torch.device("cpu"), rowwise)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with raises(ConfigError, "hardware_required", values=("NVIDIA A100-SXM4-80GB", "8.0")) as caught:
        require_float8(torch.device("cuda"), rowwise)
    assert "model.fp8.emulate=true" in caught.value.fix
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    require_float8(torch.device("cuda"), rowwise)
    with raises(ConfigError, "hardware_required", values=("model.fp8.recipe=mxfp8", "10.0", "B200", "9.0")):
        require_float8(torch.device("cuda"), blocks)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 0))
    require_float8(torch.device("cuda"), blocks)
