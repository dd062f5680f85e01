"""Estimators of the KL divergence between a policy and its reference. Torch-free to import."""

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
    """Return an estimate of KL(policy || reference) per token.

    With d = ref_logprob - logprob: k1 = -d, k2 = d^2 / 2, k3 = e^d - 1 - d. k1 is unbiased but can be negative. k3 is
    unbiased and not negative.

    Args:
        input_clamp, output_clamp: bounds of |d| and of the result. None: no clamp.
        importance: weight per token (policy / sampler probability). None: 1.
        score_term: let the weight 1 have the gradient of the token's log-prob. The gradient is then that of the sampled
            estimate, `grad(value) + value * grad(logprob)`. Otherwise it is `grad(value)`.
    """
    # Example: log-probs -1.0 of the policy and -1.5 of the reference. d = -0.5: k1 = 0.5, k2 = 0.125, k3 = 0.107.
    difference = ref_logprobs - logprobs
    if importance is not None:
        weight = importance
    elif score_term:
        weight = (logprobs - logprobs.detach()).exp()
    else:
        weight = logprobs.new_ones(logprobs.shape)
    if input_clamp is not None:
        # A clamped d has no gradient. The score term of the same token is dropped with it.
        weight = weight.detach().where(difference.abs() > input_clamp, weight)
        difference = difference.clamp(-input_clamp, input_clamp)
    value = {
        "k1": lambda d: -d,
        "k2": lambda d: d.square() / 2,
        "k3": lambda d: d.exp() - 1 - d,
    }[kl_type](difference) * weight
    result: Tensor = value if output_clamp is None else value.clamp(-output_clamp, output_clamp)
    return result
