"""Reference gradients of LoRA adapters. With W = W0 + s B A, the gradients of A and B follow from that of W.

The tested layers get a random B. Training starts with B = 0, for which the gradient of A is always zero. The base is
set to W - s B A, so that the layer computes the same as in the reference. Then dL/dB = s dL/dW A^T and dL/dA = s B^T
dL/dW, independent of the adapter library.

With DoRA, W = f (W0 + s B A) with a factor f = m / n of each row, and n is a constant in backward. The reference has a
random f and the base W / f - s B A, so m = |W|. Then the gradients are those of f dL/dW, and dL/dm = <dL/dW, W> / |W|.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_cli.distributed.expert_parallel.low_rank import MATRICES, scale_of
from automodel_cli.models import transformers_compat
from automodel_cli.models.lora import adapters as lora
from automodel_cli.models.lora import dora as lora_dora
from automodel_cli.models.lora import experts as expert_lora
from automodel_cli.models.lora import init as lora_init
from automodel_cli.models.lora import merge as lora_merge
from automodel_cli.models.lora.layer import AdapterLayer
from automodel_cli.models.lora.targets import is_embedding, is_transposed
from automodel_cli.models.lora.tokens import TokenRows
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.rng import generator_for
from automodel_cli.parity import value_head
from automodel_cli.parity.reference import Reference


@dataclass(frozen=True)
class Rows:
    """Factor `[out]` and weight `[out, in]` of a DoRA layer, and the name of its trained norms."""

    factor: Tensor
    weight: Tensor
    name: str


@dataclass(frozen=True)
class Adapter:
    """Full matrices of one layer: `a` [rank, in], `b` [out, rank]. The update is `scale * b @ a`.

    Adapters on experts have the expert as first dimension. `names`: weight, A and B in the model.
    """

    a: Tensor
    b: Tensor
    scale: float
    names: tuple[str, str, str]
    transposed: bool = False
    """Whether the layer's weight is `[in, out]`."""
    rows: Rows | None = None
    """Of DoRA."""
    of_rows: tuple[int, ...] = ()
    """Trained rows of a table, without matrices."""


@torch.no_grad()
def put_in(parts: Sequence[ModelPart]) -> dict[str, Adapter]:
    """Set a random B in every adapter without changing the output of its layer. Collective.

    Returns the adapters of all ranks by layer name.
    """
    local_adapters: dict[str, Adapter] = {}
    for model in (model for part in parts for model in part.models):
        for name, layer in lora.wrappers(model):
            if isinstance(layer, TokenRows):
                if not layer.is_tied:
                    names, none = (f"{name}.weight", f"{name}.trainable_tokens_delta", ""), torch.empty(0)
                    local_adapters[name] = Adapter(none, none, 1.0, names, of_rows=layer.token_ids)
                continue
            names = (f"{name}.weight", f"{name}.lora_A.default.weight", f"{name}.lora_B.default.weight")
            if is_embedding(layer):
                names = (f"{name}.weight", f"{name}.lora_embedding_A.default", f"{name}.lora_embedding_B.default")
            matrices = tuple(param for _, param in lora.matrices_of(name, layer))[:2]
            if is_embedding(layer):  # A starts at zero
                full = torch.randn(matrices[0].shape, generator=generator_for(2, name))
                transformers_compat.local(matrices[0]).copy_(transformers_compat.local_part(matrices[0], full))
            form = (lora_merge.scale(layer), names, is_transposed(layer))
            rows = _put_factor(name, layer) if lora_dora.has_magnitude(layer) else None
            weight = cast(Tensor, layer.get_base_layer().weight)
            local_adapters[name] = replace(_put_in(weight, matrices, *form), rows=rows)
            if (constant := lora_init.constant(layer)) is not None:  # the layer subtracts it
                transformers_compat.local(weight).add_(transformers_compat.local_part(weight, constant.contiguous()))
        for name, (experts, leaf) in expert_lora.weights(model).items():
            own = [f"{leaf}_{matrix}" for matrix in MATRICES]
            of_a, of_b = (f"{name.rpartition('.')[0]}.{matrix}" for matrix in own)
            matrices = tuple(experts.get_parameter(matrix) for matrix in own)
            form = (scale_of(experts), (name, of_a, of_b), bool(experts.is_transposed))
            local_adapters[name] = _put_in(experts.get_parameter(leaf), matrices, *form)
    all_adapters: list[dict[str, Adapter]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(all_adapters, local_adapters)
    return {name: adapter for adapters_of_rank in all_adapters for name, adapter in adapters_of_rank.items()}


def _put_factor(name: str, layer: AdapterLayer) -> Rows:
    """Divide the base weight by a random factor of each row."""
    weight, transposed = cast(Tensor, layer.get_base_layer().weight), is_transposed(layer)
    full = transformers_compat.full_tensor(weight).float().clone()
    rows = full.T if transposed else full
    factor = torch.rand(len(rows), generator=generator_for(1, name)) + 0.5
    divided = rows / factor[:, None]
    divided = divided.T if transposed else divided
    transformers_compat.local(weight).copy_(transformers_compat.local_part(weight, divided.contiguous()))
    return Rows(factor, rows, f"{name}.lora_magnitude_vector.default.weight")


def _put_in(
    weight: Tensor, matrices: tuple[Tensor, ...], scale: float, names: tuple[str, str, str], transposed: bool
) -> Adapter:
    a, b = matrices
    generator = generator_for(0, names[0].removesuffix(".weight"))
    full_b = torch.randn(b.shape, generator=generator) / math.sqrt(b.shape[-2])
    transformers_compat.local(b).copy_(transformers_compat.local_part(b, full_b))
    adapter = Adapter(transformers_compat.full_tensor(a).float().clone(), full_b, scale, names, transposed)
    update = adapter.b.double() @ adapter.a.double() * scale
    update = update.mT if transposed else update
    transformers_compat.local(weight).sub_(transformers_compat.local_part(weight, update.float()))
    return adapter


def reference_of(expected: Reference, adapters: dict[str, Adapter], saved: Collection[str] = ()) -> Reference:
    """Return the expected step that trains `adapters`, a value head and the parameters `saved`, from a step that trains
    all parameters."""
    head = f"{value_head.NAME}."
    gradients = {name: grad for name, grad in expected.gradients.items() if name in saved or name.startswith(head)}
    for adapter in adapters.values():
        weight, *names = adapter.names
        if weight not in expected.gradients:  # no gradient: an indexer only selects tokens
            continue
        grad = expected.gradients[weight].double()
        if adapter.of_rows:
            gradients[names[0]] = grad[list(adapter.of_rows)]
            continue
        grad = grad.mT if adapter.transposed else grad
        if adapter.rows is not None:
            along = (grad * adapter.rows.weight).sum(1) / adapter.rows.weight.double().norm(dim=1)
            gradients[adapter.rows.name] = along
            grad = grad * adapter.rows.factor[:, None]
        of_a, of_b = adapter.b.double().mT @ grad, grad @ adapter.a.double().mT
        gradients |= {names[0]: adapter.scale * of_a, names[1]: adapter.scale * of_b}
    norm = math.sqrt(sum(grad.square().sum().item() for grad in gradients.values()))
    # An adapted layer adds two products, of W - scale B A and of the adapter, so rounding errors enter twice.
    rounding = 2 * expected.rounding
    return Reference(expected.loss, norm, {name: grad.float() for name, grad in gradients.items()}, rounding)
