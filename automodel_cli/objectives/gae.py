"""Advantages per token from discounted rewards, with or without the values of a critic (GAE).

Pure functions of the generated tokens in order, float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EPS = 1e-8
"""Added to the variance in whitening."""


def generalized_advantages(rewards_T: Tensor, values_T: Tensor, *, gamma: float, lam: float) -> Tensor:
    """Return A_t = sum_l (gamma lam)^l d_(t+l) with d_t = r_t + gamma V_(t+1) - V_t, and V = 0 after the last token.

    This is GAE (arXiv:1506.02438, eq. 16). The returns, the targets of the critic, are these plus the values. With
    values 0 and `lam` 1, the result is the discounted sum of the rewards from each token on. Example: rewards 0, 0, 1,
    values 0, gamma 0.5 and lam 1 give 0.25, 0.5, 1.
    """
    # Example: rewards 0, 0, 1, values 0.5, gamma 1 and lam 0.5. d = 0, 0, 0.5, so A = 0.125, 0.25, 0.5. With lam 1 all
    # are 0.5.
    rewards, values = rewards_T.double().tolist(), [*values_T.double().tolist(), 0.0]
    advantages, later = [0.0] * len(rewards), 0.0
    # A_t = d_t + gamma lam A_(t+1), from the last token to the first.
    for t in reversed(range(len(rewards))):
        later = rewards[t] + gamma * values[t + 1] - values[t] + gamma * lam * later
        advantages[t] = later
    return torch.tensor(advantages, dtype=torch.float64)


def moments(values: Tensor) -> Tensor:
    """Return count, sum and sum of squares, float64 `[3]`. Ranks add them for `whitened`."""
    values = values.double()
    return torch.stack([values.new_tensor(values.numel()), values.sum(), values.square().sum()])


def whitened(values: Tensor, moments_3: Tensor) -> Tensor:
    """Return (value - mean) / deviation over all values that `moments_3` counts.

    The variance is divided by n - 1, as in `masked_whiten` of TRL. Unchanged for less than two values.
    """
    count, total, squares = moments_3.tolist()
    if count < 2:
        return values
    mean = total / count
    # Rounding can make the difference slightly negative.
    variance = max(squares / count - mean * mean, 0.0) * count / (count - 1)
    result: Tensor = (values - mean) / (variance + _EPS) ** 0.5
    return result
