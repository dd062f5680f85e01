"""The unit in the last place: values moved at random within it, as rounding does, and rounding that keeps the mean."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from automodel_cli.models.rng import generator_for

_DRAWS = 1_000_003  # a prime, so that a repeated pattern meets no two rows of a matrix in the same way


def moved_within_ulp(name: str, tensor: Tensor, stored: torch.dtype) -> Tensor:
    """Each float32 value with a uniform part of its unit in the last place in `stored` added, from -1/2 to 1/2: the
    error of rounding to `stored`. Zeros stay. The draw depends on `name` only."""
    return torch.where(tensor == 0, tensor, tensor + _ulp(tensor, stored) * (_uniform(name, tensor) - 0.5))


def round_stochastically(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Each float32 value rounded up or down to `dtype`, at random so that its mean stays. What `dtype` holds exactly
    stays as it is. The draw depends on `name` only."""
    ulp = _ulp(tensor, dtype)
    units = tensor / ulp  # exact: powers of two
    whole = units.trunc()
    up = _uniform(name, tensor) < (units - whole).abs()
    return ((whole + units.sign() * up) * ulp).to(dtype)


def _ulp(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    eps = torch.full_like(tensor, torch.finfo(dtype).eps)
    return torch.ldexp(eps, torch.frexp(tensor)[1] - 1)


def _uniform(name: str, tensor: Tensor) -> Tensor:
    """From 0 to 1, in the tensor's shape and place."""
    start = int(torch.randint(_DRAWS, (), generator=generator_for(0, name)))
    repeated = _pattern().roll(start).to(tensor.device).repeat(-(-tensor.numel() // _DRAWS))
    return repeated[: tensor.numel()].view(tensor.shape)


@functools.cache
def _pattern() -> Tensor:
    return torch.rand(_DRAWS, generator=generator_for(0, "unit in the last place"))
