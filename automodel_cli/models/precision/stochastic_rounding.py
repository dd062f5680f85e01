"""The unit in the last place: values moved at random within it, as rounding does, and rounding that keeps the mean."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from automodel_cli.models.rng import generator_for

_DRAWS = 1_000_003  # a prime, so that a repeated pattern meets no two rows of a matrix in the same way


def moved_within_ulp(name: str, tensor: Tensor, stored: torch.dtype) -> Tensor:
    """Add noise to float32 values: uniform between -1/2 and 1/2 unit in the last place of `stored`, like the rounding
    error to `stored`. Zeros stay. The random numbers depend on `name` only."""
    return torch.where(tensor == 0, tensor, tensor + _ulp(tensor, stored) * (_uniform(name, tensor) - 0.5))


def round_stochastically(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 values to `dtype` stochastically, so that the expectation is unchanged. Exactly representable
    values stay. The random numbers depend on `name` only."""
    ulp = _ulp(tensor, dtype)
    units = tensor / ulp  # exact: powers of two
    truncated = units.trunc()
    # A value 3.25 units from 0 becomes 4 units in 1 of 4 cases, else 3.
    up = _uniform(name, tensor) < (units - truncated).abs()
    return ((truncated + units.sign() * up) * ulp).to(dtype)


def _ulp(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    eps = torch.full_like(tensor, torch.finfo(dtype).eps)
    # bfloat16 has eps = 2^-7: one unit is 2^-7 for values in [1, 2), 2^-6 for 3, 2^-9 for 0.3.
    return torch.ldexp(eps, torch.frexp(tensor)[1] - 1)


def _uniform(name: str, tensor: Tensor) -> Tensor:
    """From 0 to 1, in the tensor's shape and place."""
    start = int(torch.randint(_DRAWS, (), generator=generator_for(0, name)))
    repeated = _pattern().roll(start).to(tensor.device).repeat(-(-tensor.numel() // _DRAWS))
    return repeated[: tensor.numel()].view(tensor.shape)


@functools.cache
def _pattern() -> Tensor:
    return torch.rand(_DRAWS, generator=generator_for(0, "unit in the last place"))
