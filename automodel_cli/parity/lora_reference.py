"""Adapters against the plain model: with W = W0 + s B A, the gradients of A and B follow from that of W.

The layers under test get a random B, which training would start at zero (and A's gradient would then be zero, whatever
happened), and their base is set to W - s B A, so that they compute what the reference computed. Then
dL/dB = s dL/dW A^T and dL/dA = s B^T dL/dW: closed forms, which know nothing of the adapter library.
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
from automodel_cli.parity.reference import Reference


@dataclass(frozen=True)
class Adapter:
    """Whole matrices of one layer: `a` [rank, in], `b` [out, rank]; the update is `scale * b @ a`."""

    a: Tensor
    b: Tensor
    scale: float
    transposed: bool = False
    """Whether the layer's weight is `[in, out]`."""


@torch.no_grad()
def put_in(parts: Sequence[ModelPart]) -> dict[str, Adapter]:
    """Give every adapter of these parts a random B without changing what its layer computes; returns the adapters of
    all ranks by layer name. Collective."""
    mine: dict[str, Adapter] = {}
    for part in parts:
        for name, layer in lora.wrappers(part.model):
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            whole = torch.randn(b.shape, generator=generator_for(0, name)) / math.sqrt(b.shape[0])
            transformers_compat.local(b).copy_(transformers_compat.local_part(b, whole))
            transposed = is_transposed(layer)
            adapter = Adapter(transformers_compat.full_tensor(a).float().clone(), whole, lora.scale(layer), transposed)
            weight = layer.get_base_layer().weight
            update = adapter.b.double() @ adapter.a.double() * adapter.scale
            update = update.T if adapter.transposed else update
            transformers_compat.local(weight).sub_(transformers_compat.local_part(weight, update.float()))
            mine[name] = adapter
    everywhere: list[dict[str, Adapter]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, mine)
    return {name: adapter for of_rank in everywhere for name, adapter in of_rank.items()}


def reference_of(want: Reference, adapters: dict[str, Adapter]) -> Reference:
    """What a step that trains only `adapters` must give, from what one that trains all gave."""
    gradients: dict[str, Tensor] = {}
    for name, adapter in adapters.items():
        weight = want.gradients.get(f"{name}.weight")
        if weight is None:  # the step does not reach it: an indexer only chooses
            continue
        grad = weight.double().T if adapter.transposed else weight.double()
        gradients[f"{name}.lora_B.default.weight"] = adapter.scale * grad @ adapter.a.double().t()
        gradients[f"{name}.lora_A.default.weight"] = adapter.scale * adapter.b.double().t() @ grad
    norm = math.sqrt(sum(grad.square().sum().item() for grad in gradients.values()))
    return Reference(want.loss, norm, {name: grad.float() for name, grad in gradients.items()}, want.rounding)
