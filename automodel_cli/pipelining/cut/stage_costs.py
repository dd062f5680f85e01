"""Cost of each decoder layer and of the head, so that stages take equally long."""

from __future__ import annotations

from torch import nn

from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.precision.nf4 import NF4Linear
from automodel_cli.pipelining.cut.model_structure import ModelStructure


def training_costs(part: ModelPart, anatomy: ModelStructure, lowest: int) -> tuple[list[float], float]:
    """Return the costs of the decoder layers and of the head, proportional to the FLOPs of a token.

    Forward, gradients of inputs and gradients of weights cost the same (`training/metrics/flops.py`). Layers below
    `lowest` have no backward, and frozen weights have no gradients.
    """
    # Example: a frozen layer of 10 weights costs 10 below `lowest` and 20 from there on. A trained layer costs 30.
    layers = [*part.model.get_submodule(anatomy.layers).children()]
    costs = [_cost([layer], has_backward=lowest <= index) for index, layer in enumerate(layers)]
    after = [part.model.get_submodule(name) for name in anatomy.after]
    if not part.reads_logits:
        after = [module for module in after if module is not part.model.get_output_embeddings()]
    if part.value_head is not None:
        after.append(part.value_head)
    return costs, _cost(after, has_backward=lowest < len(layers))


def lowest_with_backward(part: ModelPart, anatomy: ModelStructure) -> int:
    """Return the lowest decoder layer with a backward: -1 if anything before the layers is trained, their number if
    only the head is.

    A parameter of unknown place counts as before the layers. Backward then reaches it.
    """
    layers = [*part.model.get_submodule(anatomy.layers).children()]
    before, after = ([part.model.get_submodule(name) for name in names] for names in (anatomy.before, anatomy.after))
    last = [*after, *([] if part.value_head is None else [part.value_head])]
    place: dict[nn.Parameter, int] = {}
    for index, modules in [(-1, before), *((i, [layer]) for i, layer in enumerate(layers)), (len(layers), last)]:
        for module in modules:
            for param in module.parameters():
                place.setdefault(param, index)  # A tied table is read before the layers too.
    return min((place.get(param, -1) for param in part.parameters() if param.requires_grad), default=len(layers))


def _cost(modules: list[nn.Module], *, has_backward: bool) -> float:
    used = sum(used_weights(module) for module in modules)
    trained = sum(used_weights(module, trained_only=True) for module in modules)
    return used * (1 + has_backward) + trained


def used_weights(module: nn.Module, *, trained_only: bool = False) -> float:
    """Return the number of weights that a token is multiplied with, which is proportional to its FLOPs.

    Fused experts (`[experts, ...]`) count by the fraction that a token uses. An embedding is a lookup and counts
    nothing.
    """
    total = 0.0
    for child in module.modules():
        if isinstance(child, nn.Embedding):
            continue
        if isinstance(child, NF4Linear) and not trained_only:
            total += child.num_weights
        for param in child.parameters(recurse=False):
            if trained_only and not param.requires_grad:
                continue
            # The experts decorator of transformers sets it on fused experts.
            experts = getattr(child, "num_experts", None)
            if experts and param.dim() == 3:
                # Example: 64 experts, 8 per token. One eighth of the expert weights is used.
                total += param.numel() * float(child.config.num_experts_per_tok) / experts  # type: ignore
            else:
                total += param.numel()
    return total
