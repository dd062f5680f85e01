"""Detect routers whose rule is known (`topk_router.RouterRule`), by measurement and not by the name of a family.

A router is a sibling of the experts with one weight row per expert. Its forward returns (logits, weights, experts) of
the hidden states. A small run with random numbers compares weights and gradients with each rule. The GEMM that computes
the logits is not replaced.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import linear

from automodel_cli.distributed import kernel_report
from automodel_cli.distributed.expert_parallel import topk_router
from automodel_cli.distributed.expert_parallel.apply import is_experts
from automodel_cli.distributed.expert_parallel.router_replay import is_choosing
from automodel_cli.distributed.expert_parallel.topk_router import MOST_CHOICES, MOST_EXPERTS, RouterRule

_TOKENS = 64  # Enough tokens to reveal group-limited routing.
_TOLERANCE = 1e-5  # float32, relative to the largest value. Other rules differ by 1e-1 or more.


def routers_in(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of the routers among the children of a block."""
    experts = [child for child in block.children() if is_experts(child)]
    if not experts:
        return
    # Global size, also if the parameter is a DTensor.
    num_experts = next(experts[0].parameters(recurse=False)).shape[0]
    for name, child in block.named_children():
        weight = child._parameters.get("weight")
        if weight is not None and weight.ndim == 2 and weight.shape[0] == num_experts:
            yield name, child


def fuse_routers(part: nn.Module, device_type: str) -> None:
    """Replace selection and weighting in the routers of `part` with one kernel each way, in place.

    Does nothing if the kernels do not run on this device type. Parameters may be on the meta device.
    """
    routers = [router for block in part.modules() for _, router in routers_in(block)]
    if not routers or not topk_router.has_router_kernels(device_type):
        return
    with torch.device("cpu"):  # Device of the measurement.
        rules = [(router, rule_of(router)) for router in routers]
    for router, rule in rules:
        if rule is not None:
            router.forward = _with(router, *rule)
    num_known = sum(rule is not None for _, rule in rules)
    others = {type(router).__name__ for router, rule in rules if rule is None}
    reason = f" (no kernel has the rule of {', '.join(sorted(others))})" if others else ""
    kernel_report.record("routers", f"Triton kernels for {num_known} of {len(rules)}{reason}")


def rule_of(router: nn.Module) -> tuple[RouterRule, bool] | None:
    """Return the rule of a router and whether it computes logits in float32, or None if no rule matches."""
    weight, own = router._parameters["weight"], type(router).forward
    names = {name for name, param in router._parameters.items() if param is not None}
    if weight is None or len(weight) > MOST_EXPERTS or not names <= {"weight", "bias"} or len(router._modules):
        return None
    # An instance with its own forward (a hook, a fused kernel) may differ from the class that would be measured.
    if "forward" in vars(router) or len(inspect.signature(own).parameters) != 2:
        return None
    correction = _correction(router, len(weight))
    if correction is None and any(True for _ in router.buffers()):
        return None
    try:
        return _measured(_on_numbers(router), None if correction is None else correction[0])
    except Exception:  # The code of a family may fail on a copy of the module.
        return None


def _with(router: nn.Module, rule: RouterRule, in_float32: bool) -> Callable[[Tensor], tuple[Tensor, ...]]:
    own: Callable[[Tensor], tuple[Tensor, ...]] = router.forward

    def forward(hidden: Tensor) -> tuple[Tensor, ...]:
        weight, bias = cast(Tensor, router._parameters["weight"]), router._parameters.get("bias")
        correction = _correction(router, len(weight))
        correction_E = None if correction is None else correction[1]
        inputs = [tensor for tensor in (hidden, weight, bias, correction_E) if tensor is not None]
        if is_choosing() or any(isinstance(tensor, DTensor) for tensor in inputs):
            return own(hidden)  # The original calls topk, which replay needs, and supports DTensors.
        logits_NE = _logits(hidden, weight, bias, in_float32)
        return logits_NE, *rule(logits_NE, correction_E)

    return forward


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, in_float32: bool) -> Tensor:
    hidden_ND = hidden.reshape(-1, weight.shape[1])
    if not in_float32:
        return linear(hidden_ND, weight, bias)
    return linear(hidden_ND.float(), weight.float(), None if bias is None else bias.float())


def _correction(router: nn.Module, num_experts: int) -> tuple[str, Tensor] | None:
    """Return the only buffer of a router, if it has one number per expert: the selection bias."""
    buffers = list(router.named_buffers())
    return buffers[0] if len(buffers) == 1 and buffers[0][1].shape == (num_experts,) else None


def _on_numbers(router: nn.Module) -> nn.Module:
    """Return a copy of the router with random float32 weights. The original is not changed."""
    clone = copy.copy(router)
    generator = torch.Generator().manual_seed(2)
    clone._parameters = {
        name: param if param is None else nn.Parameter(torch.randn(param.shape, generator=generator))
        for name, param in router._parameters.items()
    }
    clone._buffers = {name: torch.randn(b.shape, generator=generator) for name, b in router.named_buffers()}
    return clone


def _measured(router: nn.Module, correction: str | None) -> tuple[RouterRule, bool] | None:
    own, weight, bias = type(router).forward, router._parameters["weight"], router._parameters.get("bias")
    assert weight is not None
    width = weight.shape[1]
    hidden_ND = torch.randn(_TOKENS, width, generator=torch.Generator().manual_seed(3)) / width**0.5
    hidden_ND.requires_grad_()
    with torch.enable_grad():
        logits_NE, weight_NK, index_NK = own(router, hidden_ND)
        if not torch.equal(logits_NE, _logits(hidden_ND, weight, bias, False)) or weight_NK.shape[1] > MOST_CHOICES:
            return None
        want = _ordered(weight_NK, index_NK, hidden_ND)
        correction_E = None if correction is None else router._buffers[correction]
        in_float32, weights_in_float32 = _dtypes(router, hidden_ND)
        for sigmoid in (False, True):
            for normalised in (True, False):
                rule = RouterRule(weight_NK.shape[1], sigmoid, normalised)
                # If the rule is right, all weights differ from the rule's by the same factor, so the ratio of sums is
                # the scale.
                scale = float(weight_NK.detach().sum() / rule.defined(logits_NE, correction_E)[0].detach().sum())
                rule = replace(rule, scale=round(scale, 6), in_float32=weights_in_float32)
                got = _ordered(*rule.defined(_logits(hidden_ND, weight, bias, in_float32), correction_E), hidden_ND)
                if all(bool((a - b).abs().max() <= _TOLERANCE * b.abs().max()) for a, b in zip(got, want, strict=True)):
                    return rule, in_float32
    return None


def _dtypes(router: nn.Module, hidden_ND: Tensor) -> tuple[bool, bool]:
    """Return whether logits, and weights, are float32 if parameters are bfloat16."""
    lower = copy.copy(router)
    lower._parameters = {
        name: param if param is None else nn.Parameter(param.detach().bfloat16())
        for name, param in router._parameters.items()
    }
    with torch.no_grad():
        logits_NE, weight_NK, _ = type(router).forward(lower, hidden_ND.bfloat16())
    return logits_NE.dtype == torch.float32, weight_NK.dtype == torch.float32


def _ordered(weight_NK: Tensor, index_NK: Tensor, hidden_ND: Tensor) -> list[Tensor]:
    """Return experts, weights and the gradient of the hidden states, sorted by expert."""
    # `topk(sorted=False)` returns experts in any order. Compare by expert.
    order_NK = index_NK.argsort(-1)
    weight_NK = weight_NK.gather(1, order_NK)
    # Random slopes: normalized weights sum to a constant, so the gradient of their plain sum is zero for every such
    # rule.
    slope_NK = torch.randn(weight_NK.shape, generator=torch.Generator().manual_seed(4))
    grad_ND = torch.autograd.grad((weight_NK.float() * slope_NK).sum(), hidden_ND, retain_graph=True)[0]
    return [index_NK.gather(1, order_NK).float(), weight_NK.detach(), grad_ND]
