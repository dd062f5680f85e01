"""Whole gradients by the library's parameter names, and how far they are from the reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from automodel_cli.models import transformers_compat, uneven_dtensor
from automodel_cli.models.model_part import ModelPart


def full(tensor: Tensor) -> Tensor:
    """A DTensor's whole value (collective over its mesh); a plain tensor as it is."""
    return transformers_compat.full_tensor(tensor)


def full_gradients(parts: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Whole gradients of all parameters that have one; of a parameter that two parts share, the first."""
    found: dict[str, Tensor] = {}
    for part in parts:
        for name, param in part.named_parameters():
            if param.grad is not None:
                own_name = ModelPart.hub_name(name) if isinstance(part, ModelPart) else name
                if uneven_dtensor.is_uneven(param):
                    uneven_dtensor.cut_like(param.grad, param)
                found.setdefault(own_name, full(param.grad).detach().clone())
    return found


def gradient_errors(want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> dict[str, float]:
    """Largest |difference| of each gradient in `got`, relative to the largest gradient of all.

    One that the reference lacks, has in another shape, or that is not finite is infinitely wrong.
    """
    scale = largest(want)
    errors = {}
    for name, grad in got.items():
        if name not in want or want[name].shape != grad.shape or not bool(torch.isfinite(grad).all()):
            errors[name] = float("inf")
        else:
            errors[name] = (grad - want[name]).abs().max().item() / scale
    return errors


def missing(want: Mapping[str, Tensor], found: Iterable[str]) -> dict[str, float]:
    """A gradient that should exist and does not is infinitely wrong, unless it is zero."""
    absent = set(want) - set(found)
    return {name: float("inf") if want[name].abs().max() > 0 else 0.0 for name in absent}


def largest(gradients: Mapping[str, Tensor]) -> float:
    return max(grad.abs().max().item() for grad in gradients.values())


def worst_of(errors: Sequence[Mapping[str, float]]) -> tuple[str, float]:
    """(parameter, error) over several ranks."""
    return max(((name, e) for of_rank in errors for name, e in of_rank.items()), key=lambda item: item[1])
