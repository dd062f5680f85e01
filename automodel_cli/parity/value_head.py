"""The value head that both sides of a comparison have: with zeros, as training starts, hidden states would get no
gradient."""

from __future__ import annotations

import torch
from torch import nn

from automodel_cli.models import transformers_compat
from automodel_cli.models.model_part import ModelPart

NAME = "value_head"


def reference_head(hidden_size: int, num_outputs: int = 1) -> nn.Linear:
    """float64, with the numbers that `fill` gives a part."""
    head = nn.Linear(hidden_size, num_outputs, bias=False, dtype=torch.float64)
    with torch.no_grad():
        for param in head.parameters():
            param.copy_(_numbers(param.shape))
    return head


def fill_value_head(part: ModelPart) -> None:
    """Nothing for a part without a value head."""
    if part.value_head is not None:
        with torch.no_grad():
            for param in part.value_head.parameters():
                transformers_compat.local(param).copy_(transformers_compat.local_part(param, _numbers(param.shape)))


def _numbers(shape: torch.Size) -> torch.Tensor:
    return torch.linspace(-0.3, 0.4, shape.numel()).view(shape)
