"""8-bit products on tensor cores against their emulation; never run on a GPU yet."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from automodel_cli.distributed.float8 import group_cast, grouped_gemm
from automodel_cli.distributed.float8 import linear as float8_linear
from automodel_cli.distributed.float8.quantization import CAPABILITY, RECIPES, Arithmetic
from automodel_cli.distributed.fusion import compiled_regions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < CAPABILITY,
        reason="needs a CUDA device with 8-bit products",
    ),
]

CUDA = torch.device("cuda")


def run(recipe: str, tokens: int, *, emulate: bool, fuser: compiled_regions.RegionCompiler | None = None):
    torch.manual_seed(0)
    linear = nn.Linear(512, 256).to(CUDA, torch.bfloat16)
    float8_linear.convert_to_float8(linear, Arithmetic(RECIPES[recipe], emulate))
    float8_linear.exclude_indivisible(linear, CUDA, fuser)
    x = torch.randn(tokens, 512, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    y = linear(x)
    y.backward(torch.randn_like(y))
    assert x.grad is not None and linear.weight.grad is not None
    return y.detach(), x.grad, linear.weight.grad


ON_THIS_GPU = [
    name
    for name, recipe in RECIPES.items()
    if not torch.cuda.is_available() or recipe.capability <= torch.cuda.get_device_capability()
]


@pytest.mark.parametrize("recipe", ON_THIS_GPU)
@pytest.mark.parametrize("tokens", [256, 77])
def test_tensor_cores_give_what_the_emulation_gives(recipe: str, tokens: int):
    """The forward product may add in 14 bits on Hopper, and every result is rounded to bf16."""
    want = run(recipe, tokens, emulate=True)
    for got, exact in zip(run(recipe, tokens, emulate=False), want, strict=True):
        assert (got - exact).abs().max() <= 2**-7 * exact.abs().max()


@pytest.mark.parametrize("recipe", ON_THIS_GPU)
def test_casts_compile_on_this_gpu_to_the_same_bits(recipe: str):
    fuser = compiled_regions.Compiled("inductor", CUDA, torch.bfloat16)
    got, want = run(recipe, 256, emulate=False, fuser=fuser), run(recipe, 256, emulate=False)
    assert not fuser.rejected, str(fuser)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


grouped = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in grouped_gemm.GENERATIONS,
    reason="needs a CUDA device with grouped 8-bit products",
)


@grouped
@pytest.mark.parametrize("counts", [[128, 64, 0, 256], [77, 0, 1, 300]], ids=["multiples of 16", "any"])
@pytest.mark.parametrize("transposed", [False, True])
def test_grouped_products_give_what_the_emulation_gives(counts: list[int], transposed: bool):
    torch.manual_seed(0)
    ends_L = torch.tensor(counts, device=CUDA).cumsum(0, dtype=torch.int32)
    rows_NK = torch.randn(sum(counts), 512, device=CUDA, dtype=torch.bfloat16)
    grad_NO = torch.randn(sum(counts), 256, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(len(counts), *((512, 256) if transposed else (256, 512)), device=CUDA, dtype=torch.bfloat16)

    def both(emulate: bool):
        fp8 = Arithmetic(RECIPES["rowwise"], emulate)
        y = grouped_gemm.grouped_gemm(fp8, rows_NK, weight, ends_L, transposed=transposed, fast=True)
        back = grouped_gemm.grouped_gemm(fp8, grad_NO, weight, ends_L, transposed=not transposed)
        return y, back, grouped_gemm.weight_gradient(fp8, rows_NK, grad_NO, ends_L)

    for got, exact in zip(both(False), both(True), strict=True):
        assert (got - exact).abs().max() <= 2**-7 * exact.abs().max()


@grouped
def test_rows_of_experts_are_cast_by_the_kernel():
    assert not group_cast.group_cast_difference(CUDA)
