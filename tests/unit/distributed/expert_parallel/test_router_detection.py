"""Routers of real families by their rules, against the families' own code; and the rules' Triton kernels against them,
in its interpreter on the CPU (skipped where triton is not installed), and compiled for an H100 without one."""

from __future__ import annotations

from tests import interpreter  # isort: skip  # before anything that imports triton

import copy
import sys

import pytest
import torch
from torch import Tensor, nn

from automodel_cli.distributed.expert_parallel import router_detection, topk_router
from automodel_cli.distributed.expert_parallel.router_replay import choosing, selects_by
from automodel_cli.distributed.expert_parallel.topk_router import RouterRule
from tests import tiny

FAMILIES = {
    "qwen3_moe": (False, True),
    "mixtral": (False, True),
    "gpt_oss": (False, True),  # softmax of the chosen logits is the same
    "deepseek_v3": (True, True),
}


def _router(family: str) -> nn.Module:
    model = tiny.build_hf(family)
    router = next(router for block in model.modules() for _, router in router_detection.routers_in(block))
    generator = torch.Generator().manual_seed(7)
    for tensor in (*router.parameters(), *router.buffers()):
        nn.init.normal_(tensor, std=0.5, generator=generator)
    if family == "deepseek_v3":  # as Moonlight
        router.num_group = router.topk_group = 1
    return router


def _outcome(run, hidden_ND: Tensor, router: nn.Module) -> list[Tensor]:
    """Logits, experts and weights in the order of experts, and gradients of hidden states and parameters."""
    leaf_ND = hidden_ND.clone().requires_grad_()
    logits_NE, weight_NK, index_NK = run(leaf_ND)
    order_NK = index_NK.argsort(-1)
    weight_NK = weight_NK.gather(1, order_NK)
    total = (weight_NK.double() * torch.linspace(-1, 2, weight_NK.numel()).view_as(weight_NK)).sum()
    grads = torch.autograd.grad(total + logits_NE.double().sin().sum(), [leaf_ND, *router.parameters()])
    return [logits_NE.detach(), index_NK.gather(1, order_NK), weight_NK.detach(), *grads]


def test_the_rule_of_each_family_is_found_also_at_real_width() -> None:
    for family, (sigmoid, normalised) in FAMILIES.items():
        router = _router(family)
        wide = copy.copy(router)
        wide.hidden_dim = 2880
        wide._parameters = {**router._parameters, "weight": nn.Parameter(torch.empty(len(router.weight), 2880))}
        for one in (router, wide):
            found = router_detection.rule_of(one)
            assert found is not None, family
            assert (found[0].sigmoid, found[0].normalised) == (sigmoid, normalised), family


class _Unlike:
    """Ways to choose by another rule."""

    @staticmethod
    def groups(router: nn.Module) -> None:
        router.num_group, router.topk_group = 2, 1

    @staticmethod
    def another_parameter(router: nn.Module) -> None:
        router.scale = nn.Parameter(torch.ones(1))

    @staticmethod
    def somebody_elses_forward(router: nn.Module) -> None:
        router.forward = router.forward


@pytest.mark.parametrize("change", [f for name, f in vars(_Unlike).items() if not name.startswith("_")])
def test_routers_of_another_rule_are_left_to_their_family(change) -> None:
    router = _router("deepseek_v3")
    change.__func__(router)
    assert router_detection.rule_of(router) is None


@interpreter.needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_choose_and_weigh_as_the_family_does(family: str, dtype: torch.dtype, monkeypatch) -> None:
    router = _router(family).to(dtype)
    if family == "deepseek_v3":
        router.e_score_correction_bias = router.e_score_correction_bias.float()
    hidden_ND = torch.randn(33, router.weight.shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)
    want = _outcome(type(router).forward.__get__(router), hidden_ND, router)
    monkeypatch.setattr(topk_router, "has_router_kernels", lambda device_type: True)
    model = nn.Module()
    model.add_module("block", _beside_experts(router))
    router_detection.fuse_routers(model, "cpu")
    assert "forward" in vars(router)
    got = _outcome(router, hidden_ND, router)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine.double() - theirs.double()).abs().max() <= tolerance * theirs.double().abs().max()


class _Backwards:
    """`RouterDecisions`: the experts of the last token first."""

    def choose(self, layer: int, own_NK: Tensor) -> Tensor:
        return own_NK.flip(0)

    def again(self) -> _Backwards:
        return self


def test_a_fused_router_takes_experts_that_are_chosen_for_it(monkeypatch) -> None:
    router = _router("qwen3_moe")
    hidden_ND = torch.randn(9, router.weight.shape[1], generator=torch.Generator().manual_seed(1))
    own_NK = router(hidden_ND)[2]
    monkeypatch.setattr(topk_router, "has_router_kernels", lambda device_type: True)
    model = nn.Module()
    model.add_module("block", _beside_experts(router))
    router_detection.fuse_routers(model, "cpu")
    selects_by(router, 0, 1)
    with choosing(_Backwards()):
        assert torch.equal(router(hidden_ND)[2], own_NK.flip(0))


def _beside_experts(router: nn.Module) -> nn.Module:
    block, experts = nn.Module(), nn.Module()
    experts.num_experts, experts.is_transposed, experts.has_gate = len(router.weight), False, True
    experts.down_proj = nn.Parameter(torch.ones(len(router.weight), 1, 1))
    block.router, block.experts = router, experts
    return block


@interpreter.needs_triton
def test_numbers_that_are_none_choose_experts_that_exist() -> None:
    weight_NK, index_NK = RouterRule(3, False, True)(torch.full((4, 5), torch.nan), None)
    assert weight_NK.isnan().all() and ((index_NK >= 0) & (index_NK < 5)).all()


@interpreter.needs_triton
def test_the_comparison_that_decides_on_a_gpu_passes_here_and_sees_a_wrong_kernel(monkeypatch) -> None:
    from automodel_cli.distributed.expert_parallel import topk_router_triton

    assert topk_router.router_kernel_error(torch.device("cpu")) < topk_router._PROBE_ERROR
    right = topk_router_triton.back
    monkeypatch.setattr(topk_router_triton, "back", lambda *given: right(*given) * 1.001)
    assert topk_router.router_kernel_error(torch.device("cpu")) > topk_router._PROBE_ERROR


@interpreter.needs_triton
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's compiler is for Linux")
def test_both_kernels_compile_for_an_h100_without_spilling_registers() -> None:
    kinds = {"logits": "*bf16", "correction": "*fp32", "weights": "*bf16", "index": "*i64", "grads": "*bf16"}
    kinds |= {"result": "*bf16", "num_rows": "i32", "num_experts": "i32", "scale": "fp32", "smallest": "fp32"}
    flags = {"sigmoid": True, "corrected": True, "normalised": True}
    fixed = {"choices": 8, **flags, "rows": 16, "padded": 128, "places": 8}
    interpreter.compile_for_an_h100(
        "automodel_cli.distributed.expert_parallel.topk_router_triton", ["_choose", "_back"], kinds, fixed
    )
