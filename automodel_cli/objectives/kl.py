"""Estimates of the KL divergence between a policy and its reference. Torch-free to import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

KLType = Literal["k1", "k2", "k3"]
"""Estimator (http://joschu.net/blog/kl-approx.html)."""


def kl_penalty(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    kl_type: KLType,
    *,
    input_clamp: float | None = 20.0,
    output_clamp: float | None = 10.0,
    importance: Tensor | None = None,
    score_term: bool = True,
) -> Tensor:
    """Estimate of KL(policy || reference) by token.

    `importance` weighs each token (policy / sampler probability). Without it the weight is 1. With `score_term` this 1
    carries the gradient of the token's log-prob, so the gradient is that of the sampled estimate:
    `grad(value) + value * grad(logprob)`. Without it the gradient is `grad(value)` alone.
    """
    difference = ref_logprobs - logprobs
    if importance is not None:
        weight = importance
    elif score_term:
        weight = (logprobs - logprobs.detach()).exp()
    else:
        weight = logprobs.new_ones(logprobs.shape)
    if input_clamp is not None:
        weight = weight.detach().where(difference.abs() > input_clamp, weight)
        difference = difference.clamp(-input_clamp, input_clamp)
    value = {
        "k1": lambda d: -d,
        "k2": lambda d: d.square() / 2,
        "k3": lambda d: d.exp() - 1 - d,
    }[kl_type](difference) * weight
    return value if output_clamp is None else value.clamp(-output_clamp, output_clamp)
