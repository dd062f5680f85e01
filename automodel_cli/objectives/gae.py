"""What each token of a response is worth: discounted rewards to come, with a critic's values or without.

Pure functions of the tokens that the model drew, in their order; float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

_EPS = 1e-8
"""Of the variance that whitening divides by."""


def generalised_advantages(rewards_T: Tensor, values_T: Tensor, *, gamma: float, lam: float) -> Tensor:
    """A_t = sum over l of (gamma lam)^l d_(t+l), d_t = r_t + gamma V_(t+1) - V_t, and V = 0 after the last token: GAE,
    arXiv:1506.02438, eq. 16. The returns that a critic is trained on are these plus the values.

    With values of 0 and `lam` 1 it is the discounted sum of the rewards from each token on.
    """
    rewards, values = rewards_T.double().tolist(), [*values_T.double().tolist(), 0.0]
    advantages, later = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        later = rewards[t] + gamma * values[t + 1] - values[t] + gamma * lam * later
        advantages[t] = later
    return torch.tensor(advantages, dtype=torch.float64)


def moments(values: Tensor) -> Tensor:
    """Number, sum and sum of squares: what ranks add up for `whitened`. float64 `[3]`."""
    values = values.double()
    return torch.stack([values.new_tensor(values.numel()), values.sum(), values.square().sum()])


def whitened(values: Tensor, moments_3: Tensor) -> Tensor:
    """(value - mean) / deviation over all that `moments_3` counts; the variance is divided by n - 1, as TRL's
    `masked_whiten` does. Unchanged where there are less than two."""
    count, total, squares = moments_3.tolist()
    if count < 2:
        return values
    mean = total / count
    variance = max(squares / count - mean * mean, 0.0) * count / (count - 1)
    return (values - mean) / (variance + _EPS) ** 0.5
