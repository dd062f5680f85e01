"""Reference gradients of LoRA adapters. With W = W0 + s B A, the gradients of A and B follow from that of W.

The tested layers get a random B. Training starts with B = 0, for which the gradient of A is always zero. The base is
set to W - s B A, so that the layer computes the same as in the reference. Then dL/dB = s dL/dW A^T and dL/dA = s B^T
dL/dW, independent of the adapter library.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_cli.models import lora, transformers_compat
from automodel_cli.models.lora_targets import is_transposed
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.rng import generator_for
from automodel_cli.parity import value_head
from automodel_cli.parity.reference import Reference


@dataclass(frozen=True)
class Adapter:
    """Full matrices of one layer: `a` [rank, in], `b` [out, rank]. The update is `scale * b @ a`."""

    a: Tensor
    b: Tensor
    scale: float
    transposed: bool = False
    """Whether the layer's weight is `[in, out]`."""


@torch.no_grad()
def put_in(parts: Sequence[ModelPart]) -> dict[str, Adapter]:
    """Set a random B in every adapter without changing the output of its layer. Collective.

    Returns the adapters of all ranks by layer name.
    """
    local_adapters: dict[str, Adapter] = {}
    for part in parts:
        for name, layer in lora.wrappers(part.model):
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            full_b = torch.randn(b.shape, generator=generator_for(0, name)) / math.sqrt(b.shape[0])
            transformers_compat.local(b).copy_(transformers_compat.local_part(b, full_b))
            transposed = is_transposed(layer)
            adapter = Adapter(transformers_compat.full_tensor(a).float().clone(), full_b, lora.scale(layer), transposed)
            weight = layer.get_base_layer().weight
            update = adapter.b.double() @ adapter.a.double() * adapter.scale
            update = update.T if adapter.transposed else update
            transformers_compat.local(weight).sub_(transformers_compat.local_part(weight, update.float()))
            local_adapters[name] = adapter
    all_adapters: list[dict[str, Adapter]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(all_adapters, local_adapters)
    return {name: adapter for adapters_of_rank in all_adapters for name, adapter in adapters_of_rank.items()}


def reference_of(expected: Reference, adapters: dict[str, Adapter]) -> Reference:
    """Return the expected step that trains `adapters` and a value head, from a step that trains all parameters."""
    heads = {name: grad.double() for name, grad in expected.gradients.items() if name.startswith(f"{value_head.NAME}.")}
    gradients: dict[str, Tensor] = heads
    for name, adapter in adapters.items():
        weight = expected.gradients.get(f"{name}.weight")
        if weight is None:  # no gradient: an indexer only selects tokens
            continue
        grad = weight.double().T if adapter.transposed else weight.double()
        gradients[f"{name}.lora_B.default.weight"] = adapter.scale * grad @ adapter.a.double().t()
        gradients[f"{name}.lora_A.default.weight"] = adapter.scale * adapter.b.double().t() @ grad
    norm = math.sqrt(sum(grad.square().sum().item() for grad in gradients.values()))
    return Reference(expected.loss, norm, {name: grad.float() for name, grad in gradients.items()}, expected.rounding)
