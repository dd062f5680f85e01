"""Grouped products in 8-bit floats against casts written out in Python and products in float64, against torchao's
casts, and the Triton kernel in its interpreter (skipped where triton is not installed)."""

from __future__ import annotations

from tests import interpreter  # isort: skip  # before anything that imports triton

import math
import sys

import pytest
import torch
from torch.nn.functional import grouped_mm

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.expert_parallel.grouped_mlp import GatedExperts
from automodel_cli.distributed.expert_parallel.grouped_mlp_gemms import parameters_of
from automodel_cli.distributed.float8 import group_cast, grouped_gemm
from automodel_cli.distributed.float8.quantization import RECIPES, Arithmetic
from tests import tiny
from tests.errors import raises

E4M3 = torch.float8_e4m3fn
COUNTS = [5, 0, 20, 16, 7]  # rows of each expert: none, one below, at and above a multiple of 16
ENDS = torch.tensor(COUNTS).cumsum(0, dtype=torch.int32)
ROWS, INPUTS, OUTPUTS = sum(COUNTS), 48, 32


def numbers(*shape: int, seed: int) -> torch.Tensor:
    """Rows and columns of very different size, one row of zeros."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    values *= torch.logspace(-3, 2, shape[-2])[:, None] * torch.logspace(2, -4, shape[-1])
    values[..., 2, :] = 0
    return values


def cast(values: list[float]) -> list[float]:
    """Numbers that share a scale, in Python's floats, each rounded by torch's cast."""
    largest = max([abs(v) for v in values] + [1e-12])
    scale = 2.0 ** (math.frexp(torch.tensor(448 / largest, dtype=torch.float32).item())[1] - 1)
    return [torch.tensor(v * scale).clamp(-448, 448).to(E4M3).double().item() / scale for v in values]


def cast_rows(matrix: torch.Tensor) -> torch.Tensor:
    return torch.tensor([cast(row) for row in matrix.tolist()], dtype=torch.float64)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want).abs().max() / want.abs().max()).item()


def groups() -> list[slice]:
    return [slice(end - count, end) for end, count in zip(ENDS.tolist(), COUNTS, strict=True)]


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_times_weights_are_those_of_the_definition(transposed: bool) -> None:
    rows, weights = numbers(ROWS, INPUTS, seed=0), numbers(len(COUNTS), OUTPUTS, INPUTS, seed=1)
    given = weights.transpose(-2, -1).contiguous() if transposed else weights
    got = grouped_gemm.grouped_gemm(Arithmetic(RECIPES["rowwise"], True), rows, given, ENDS, transposed=transposed)
    pairs = [(rows[at], w) for at, w in zip(groups(), weights, strict=True) if len(rows[at])]
    want = torch.cat([cast_rows(x) @ cast_rows(w).t() for x, w in pairs])
    assert error(got, want) < 1e-6 and error(got[:6], want[:6]) < 1e-6, "small rows too"


def test_gradients_of_weights_have_a_scale_for_each_feature_of_an_experts_tokens() -> None:
    first, second = numbers(ROWS, INPUTS, seed=2), numbers(ROWS, OUTPUTS, seed=3)
    got = grouped_gemm.weight_gradient(Arithmetic(RECIPES["rowwise"], True), first, second, ENDS)
    exact = grouped_gemm.weight_gradient(Arithmetic(RECIPES["rowwise_with_gw_hp"], True), first, second, ENDS)
    for expert, at in enumerate(groups()):
        if not first[at].numel():
            assert not got[expert].any()
            continue
        assert error(got[expert], cast_rows(first[at].t()) @ cast_rows(second[at].t()).t()) < 1e-6
        assert error(exact[expert], first[at].t().double() @ second[at].double()) < 1e-6


def by_triton(x_NF: torch.Tensor, ends_L: torch.Tensor) -> tuple[torch.Tensor, ...]:
    from automodel_cli.distributed.float8 import group_cast_triton

    places = group_cast.num_places(len(x_NF), len(ends_L))
    values_FP, *rest = group_cast_triton.cast(x_NF, ends_L, places, torch.float32)  # its interpreter rounds otherwise
    return values_FP.to(E4M3), *rest


WAYS = [group_cast.cast_groups, pytest.param(by_triton, marks=interpreter.needs_triton)]


@pytest.mark.parametrize("way", WAYS, ids=["as defined", "by Triton"])
def test_each_experts_rows_begin_at_a_multiple_of_16_with_zeros_behind(way) -> None:
    x = numbers(ROWS, INPUTS, seed=4).bfloat16()
    values_FP, inverse_LF, ends_L = way(x, ENDS)
    assert values_FP.is_contiguous() and values_FP.shape[1] % 16 == 0
    assert ends_L.tolist() == [16, 16, 48, 64, 80] and ends_L.dtype == torch.int32
    for expert, (at, end) in enumerate(zip(groups(), ends_L.tolist(), strict=True)):
        count = COUNTS[expert]
        begin = end - -(-count // 16) * 16
        back_FN = values_FP[:, begin:end].double() * inverse_LF[expert][:, None].double()
        assert torch.equal(back_FN[:, :count], cast_rows(x[at].float().t()).view(INPUTS, count))
        assert not back_FN[:, count:].any()


@interpreter.needs_triton
def test_the_comparison_that_decides_on_a_gpu_passes_here_and_sees_a_wrong_kernel(monkeypatch) -> None:
    from automodel_cli.distributed.float8 import group_cast_triton

    assert not group_cast.group_cast_difference(torch.device("cpu"))
    right = group_cast_triton.cast

    def wrong(*given):
        values_FP, inverse_LF, ends_L = right(*given)
        return values_FP, inverse_LF * 2, ends_L

    monkeypatch.setattr(group_cast_triton, "cast", wrong)
    assert "differs" in group_cast.group_cast_difference(torch.device("cpu"))


@interpreter.needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
def test_the_kernel_compiles_for_an_h100_without_spilling_registers() -> None:
    kinds = {"x": "*bf16", "ends": "*i32", "values": "*fp8e4nv", "inverse": "*fp32", "padded_ends": "*i32"}
    kinds |= dict.fromkeys(["num_features", "num_places", "num_groups"], "i32")
    fixed = {"padded": 128, "rows": 64, "width": 64}
    interpreter.compile_for_an_h100(
        "automodel_cli.distributed.float8.group_cast_triton", ["_cast_groups"], kinds, fixed
    )


def test_casts_are_torchaos() -> None:
    """For gradients of weights torchao casts each expert's rows along its tokens, by this reference of its kernels."""
    utils = pytest.importorskip("torchao.prototype.moe_training.utils")
    x = numbers(64, INPUTS, seed=5)
    ends = torch.tensor([16, 32, 64], dtype=torch.int32)  # theirs wants multiples of 16, and rows of each
    values, scales = utils.torch_to_float8_per_group_colwise(x, ends, E4M3, round_scales_to_power_of_2=True)
    values_FP, inverse_LF, _ = group_cast.cast_groups(x, ends)
    assert torch.equal(values_FP[:, :64].t().float(), values.float())
    assert torch.equal(inverse_LF, scales.view(3, -1).reciprocal())
    weights = numbers(3, OUTPUTS, INPUTS, seed=6)
    theirs, scale = utils.torch_to_3d_rowwise_float8_transpose_rhs(weights.transpose(-2, -1), E4M3, True)
    operand = Arithmetic(RECIPES["rowwise"], True).operand(weights, transposed=True)
    assert torch.equal(operand.values_MK.float(), theirs.float().transpose(-2, -1))
    assert torch.equal(operand.inverse, scale.transpose(-2, -1).reciprocal())


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])  # weights either way around, biases
def test_a_layer_of_experts_has_these_products_and_nothing_else(family: str, monkeypatch) -> None:
    experts = next(m for m in tiny.build_hf(family).modules() if hasattr(m, "is_transposed"))
    torch.manual_seed(0)
    hidden, index = torch.randn(11, 64), torch.stack([torch.randperm(experts.num_experts)[:2] for _ in range(11)])
    weight = torch.rand(11, 2)

    def layer(recipe: str | None, fp8=None):
        fp8 = Arithmetic(RECIPES[recipe], emulate=True) if recipe else fp8
        known = GatedExperts.of(experts, experts.num_experts, None, fp8=fp8)
        given = [t.detach().clone().requires_grad_() for t in (hidden, weight, *parameters_of(experts))]
        y = known(given[0], index, given[1], given[2:])
        return [y.detach(), *torch.autograd.grad(y.square().sum(), given)]

    exact, got, with_exact_weights = layer(None), layer("rowwise"), layer("rowwise_with_gw_hp")
    assert all(1e-3 < error(a, b.double()) < 0.2 for a, b in zip(got[:4], exact[:4], strict=True))
    assert torch.equal(got[0], with_exact_weights[0]) and not torch.equal(got[3], with_exact_weights[3])
    paused = Arithmetic(RECIPES["rowwise"], emulate=True)
    paused.paused = True
    assert all(torch.equal(a, b) for a, b in zip(layer(None, paused), exact, strict=True))
    asked: list = []

    def product(fp8, rows, weights, ends, *, transposed, fast=False):
        asked.append((transposed, fast))
        return grouped_mm(rows, weights if transposed else weights.transpose(-2, -1), offs=ends)

    def weight_gradient(fp8, first, second, ends):
        asked.append("gradient")
        return grouped_mm(first.t(), second, offs=ends)

    monkeypatch.setattr(grouped_gemm, "grouped_gemm", product)
    monkeypatch.setattr(grouped_gemm, "weight_gradient", weight_gradient)
    assert all(torch.equal(a, b) for a, b in zip(layer("rowwise"), exact, strict=True))
    transposed = bool(experts.is_transposed)
    assert asked == [(transposed, True)] * 2 + [(not transposed, False)] * 2 + ["gradient"] * 2


def test_gpus_without_grouped_products_are_refused_by_name(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA L40S")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    fix = "model.fp8.experts=false"
    with raises(ConfigError, "hardware_required", keys=("model.fp8.experts",), values=("NVIDIA L40S", "8.9"), fix=fix):
        grouped_gemm.require_grouped(torch.device("cuda"), RECIPES["rowwise"])
    for generation in (9, 10):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, g=generation: (g, 0))
        grouped_gemm.require_grouped(torch.device("cuda"), RECIPES["rowwise"])
