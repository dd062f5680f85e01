"""Top-k routing as one kernel each way: from the logits of a router to experts and weights.

Supports routers that score experts by softmax or sigmoid, select the highest scores after an optional selection bias,
and scale or normalize the weights. On CUDA, Triton kernels (`topk_router_triton`) replace seven kernels of forward and
eleven of backward. They have not run on a GPU yet. On first use they are compared with the definition. If they differ,
they are disabled with a warning.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from automodel_cli.distributed import kernel_verification
from automodel_cli.distributed.typed_torch import Ctx, Function

MOST_CHOICES = 32
MOST_EXPERTS = 4096
_PROBE_ERROR = 1e-5  # Absolute, for float32 numbers of order 1.


@dataclass(frozen=True)
class RouterRule:
    """How a router computes scores and weights.

    Attributes:
        choices: experts per token, K.
        sigmoid: score by sigmoid instead of softmax.
        normalised: divide the weights of a token by their sum.
        scale: factor of all weights.
        in_float32: return weights in float32 instead of the dtype of the logits.
    """

    choices: int
    sigmoid: bool
    normalised: bool
    scale: float = 1.0
    in_float32: bool = True

    def defined(self, logits_NE: Tensor, correction_E: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return weights `[N, K]` and experts, int64 `[N, K]`, computed by torch operators.

        `correction_E` is added for the selection only. Weights are scores without it.
        """
        # Example: scores [0.5, 0.3, 0.15, 0.05] and K = 2 select experts 0 and 1 with weights 0.5 and 0.3, or 0.625 and
        # 0.375 if normalized. With the bias [0, 0, 0.2, 0], expert 2 (0.35) replaces expert 1. Its weight comes from
        # its score 0.15: 0.5 / 0.65 and 0.15 / 0.65.
        # float32: in bfloat16, close scores become equal and `topk` would break ties arbitrarily.
        x_NE = logits_NE.float()
        score_NE = x_NE.sigmoid() if self.sigmoid else x_NE.softmax(-1)
        chosen_NE = score_NE if correction_E is None else score_NE + correction_E
        index_NK = chosen_NE.topk(self.choices, dim=-1).indices
        weight_NK = score_NE.gather(1, index_NK)
        if self.normalised:
            # Sigmoid scores can all be 0. The constant of DeepSeek's code avoids 0 / 0.
            weight_NK = weight_NK / (weight_NK.sum(-1, keepdim=True) + 1e-20)
        return (weight_NK * self.scale).to(torch.float32 if self.in_float32 else logits_NE.dtype), index_NK

    def __call__(self, logits_NE: Tensor, correction_E: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute `defined` with the kernels."""
        weight_NK, index_NK = _Route.apply(logits_NE, correction_E, self)
        return weight_NK, index_NK


class _Route(Function):
    @staticmethod
    def forward(ctx: Ctx, logits_NE: Tensor, correction_E: Tensor | None, rule: RouterRule) -> tuple[Tensor, Tensor]:
        logits_NE = logits_NE.contiguous()
        weight_NK, index_NK = route(
            logits_NE, correction_E, rule.choices, rule.sigmoid, rule.normalised, rule.scale, rule.in_float32
        )
        ctx.save_for_backward(logits_NE, index_NK)
        ctx.rule = rule
        # The selection has no gradient. Gradients reach the logits through the weights of the selected experts.
        ctx.mark_non_differentiable(index_NK)
        # Without this, autograd allocates zeros for the gradient of the indices.
        ctx.set_materialize_grads(False)
        return weight_NK, index_NK

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if grads[0] is None:  # The weights were not used.
            return None, None, None
        logits_NE, index_NK = ctx.saved_tensors
        rule: RouterRule = ctx.rule
        of_logits_NE = route_backward(
            grads[0].contiguous(), logits_NE, index_NK, rule.sigmoid, rule.normalised, rule.scale
        )
        return of_logits_NE, None, None


@torch.library.custom_op("automodel::route", mutates_args=())
def route(
    logits_NE: Tensor,
    correction_E: Tensor | None,
    choices: int,
    sigmoid: bool,
    normalised: bool,
    scale: float,
    in_float32: bool,
) -> tuple[Tensor, Tensor]:
    """Compute `RouterRule.defined` with a Triton kernel."""
    from automodel_cli.distributed.expert_parallel import topk_router_triton

    dtype = torch.float32 if in_float32 else logits_NE.dtype
    return topk_router_triton.choose(logits_NE, correction_E, choices, sigmoid, normalised, scale, dtype)


@route.register_fake
def _(
    logits_NE: Tensor,
    correction_E: Tensor | None,
    choices: int,
    sigmoid: bool,
    normalised: bool,
    scale: float,
    in_float32: bool,
) -> tuple[Tensor, Tensor]:
    shape, dtype = (len(logits_NE), choices), torch.float32 if in_float32 else logits_NE.dtype
    return logits_NE.new_empty(shape, dtype=dtype), logits_NE.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op("automodel::route_backward", mutates_args=())
def route_backward(
    grad_NK: Tensor, logits_NE: Tensor, index_NK: Tensor, sigmoid: bool, normalised: bool, scale: float
) -> Tensor:
    """Return the gradient of the logits, `[N, E]`."""
    from automodel_cli.distributed.expert_parallel import topk_router_triton

    return topk_router_triton.back(grad_NK, logits_NE, index_NK, sigmoid, normalised, scale)


@route_backward.register_fake
def _(
    grad_NK: Tensor, logits_NE: Tensor, index_NK: Tensor, sigmoid: bool, normalised: bool, scale: float
) -> Tensor:  # fmt: skip
    return torch.empty_like(logits_NE)


@functools.cache
def has_router_kernels(device_type: str) -> bool:
    """Return whether the Triton kernels are used on this device type. Warns once if CUDA cannot use them."""
    return kernel_verification.trusted(
        device_type,
        "routers",
        lambda device: kernel_verification.beyond(router_kernel_error(device), _PROBE_ERROR),
    )


def router_kernel_error(device: torch.device) -> float:
    """Return the largest error of both kernels against autograd of the definition in float32. inf if experts differ."""
    generator, errors = torch.Generator().manual_seed(0), [torch.zeros((), device=device)]
    for num_experts, choices in ((128, 8), (5, 1), (300, 6)):
        logits_NE = torch.randn(37, num_experts, generator=generator).to(device)
        grad_NK = torch.randn(37, choices, generator=generator).to(device)
        correction_E = torch.randn(num_experts, generator=generator).to(device)
        for sigmoid, normalised in ((False, False), (False, True), (True, False), (True, True)):
            rule = RouterRule(choices, sigmoid, normalised, scale=1.5)
            correction = correction_E if sigmoid else None
            results = []
            for function in (rule, rule.defined):
                leaf_NE = logits_NE.clone().requires_grad_()
                weight_NK, index_NK = function(leaf_NE, correction)
                results.append((weight_NK, index_NK, torch.autograd.grad((weight_NK * grad_NK).sum(), leaf_NE)[0]))
            (weights, chosen, gradient), (weights_, chosen_, gradient_) = results
            # With other experts, a comparison of weights has no meaning.
            if not torch.equal(chosen, chosen_):
                return float("inf")
            errors += [(weights - weights_).abs().max(), (gradient - gradient_).abs().max()]
    return float(torch.stack(errors).detach().max())
