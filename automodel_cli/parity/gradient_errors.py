"""Full gradients by hub parameter name, and their errors against the reference."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from automodel_cli.models import transformers_compat, uneven_dtensor
from automodel_cli.models.model_part import ModelPart


def full(tensor: Tensor) -> Tensor:
    """Return the full value of a DTensor (collective over its mesh), or the tensor itself."""
    return transformers_compat.full_tensor(tensor)


def full_gradients(parts: Iterable[nn.Module]) -> dict[str, Tensor]:
    """Return full gradients of all parameters that have one. For shared parameters, the first."""
    gradients: dict[str, Tensor] = {}
    for part in parts:
        for name, param in part.named_parameters():
            if param.grad is not None:
                own_name = ModelPart.hub_name(name) if isinstance(part, ModelPart) else name
                if uneven_dtensor.is_uneven(param):
                    uneven_dtensor.cut_like(param.grad, param)
                gradients.setdefault(own_name, full(param.grad).detach().clone())
    return gradients


def gradient_errors(want: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest |difference| of each gradient, relative to the largest gradient of all.

    Missing in the reference, another shape, or non-finite values count as infinite errors.
    """
    scale = largest(want)
    errors = {}
    for name, grad in got.items():
        if name not in want or want[name].shape != grad.shape or not bool(torch.isfinite(grad).all()):
            errors[name] = float("inf")
        else:
            # Relative to the largest gradient of the model: a tiny gradient has a large relative error of its own from
            # rounding.
            errors[name] = (grad - want[name]).abs().max().item() / scale
    return errors


def missing(want: Mapping[str, Tensor], found: Iterable[str]) -> dict[str, float]:
    """Return infinite errors for missing gradients, unless the expected gradient is zero."""
    absent = set(want) - set(found)
    return {name: float("inf") if want[name].abs().max() > 0 else 0.0 for name in absent}


def largest(gradients: Mapping[str, Tensor]) -> float:
    return max(grad.abs().max().item() for grad in gradients.values())


def worst_of(errors: Sequence[Mapping[str, float]]) -> tuple[str, float]:
    """Return the largest (parameter, error) over several ranks."""
    return max(((name, e) for of_rank in errors for name, e in of_rank.items()), key=lambda item: item[1])
