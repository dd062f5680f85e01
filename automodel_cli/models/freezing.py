"""Choose the parameters that are trained.

`requires_grad` is set on the complete model, before it is split and sharded. So every layout freezes the same
parameters, and no strategy allocates gradients, reductions or optimizer states for the others.
"""

from __future__ import annotations

from torch import nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.parameter_patterns import EVERYTHING, Selection, any_matches, check_matched
from automodel_cli.distributed.expert_parallel.apply import is_experts
from automodel_cli.distributed.layer_wrapping import transformer_layers
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.vision.config import VisionConfig


def freeze(part: ModelPart, selection: Selection) -> None:
    """Freeze the parameters of a complete model that a selection excludes. Tied parameters match by each of their
    names. Parameters that are frozen already stay frozen.

    Raises ConfigError for a pattern without a trained parameter, and if no parameter remains.
    """
    if selection == EVERYTHING:
        return
    names = _trained_names(part)
    if selection.trainable:
        check_matched("train.trainable", selection.trainable, names, what="trained parameter")
        _keep(names, {param for name, param in names.items() if any_matches(selection.trainable, name)})
        names = _trained_names(part)
    check_matched("train.freeze", selection.freeze, names, what="trained parameter")
    frozen = {param for name, param in names.items() if any_matches(selection.freeze, name)}
    _keep(names, set(names.values()) - frozen)
    if not _trained_names(part):
        keys = tuple(f"train.{key}" for key in ("freeze", "trainable") if getattr(selection, key))
        raise ConfigError(
            f"train.freeze={list(selection.freeze)} freezes every parameter, so nothing is trained",
            code="nothing_to_train",
            keys=keys,
            fix="train.freeze=[]",
        )


def trained_work(part: ModelPart, *, logits: bool) -> tuple[int, int]:
    """Return what costs a backward in a complete model: its lowest layer that has one, and the number of trained
    matrix parameters that a token passes through (of experts, the chosen ones).

    Args:
        logits: whether the LM head is read. A tied table then counts as the head, otherwise as a lookup only.
    """
    model = part.model
    layers, head, table = transformer_layers(model), model.get_output_embeddings(), model.get_input_embeddings()
    layer_of = {param: index for index, layer in enumerate(layers) for param in layer.parameters()}
    unread = set(table.parameters()) - (set(head.parameters()) if logits and head is not None else set())
    of_experts = {p for module in model.modules() if is_experts(module) for p in module.parameters(recurse=False)}
    share = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    first, matrices, has_begun = len(layers), 0, False
    for name, param in part.named_parameters():
        has_begun |= param in layer_of  # models list parameters in the order of the forward pass
        if not param.requires_grad:
            continue
        first = min(first, layer_of.get(param, len(layers) if has_begun else 0))
        if param.ndim > 1 and not name.endswith("bias") and param not in unread:
            matrices += param.numel() * share // len(param) if share and param in of_experts else param.numel()
    return first, matrices


def freeze_by_vision(part: ModelPart, vision: VisionConfig) -> None:
    """Freeze the tower, the projector and the text model as `model.vision` sets them."""
    assert part.front is not None, "the front end is added before"
    for name, param in part.front.composite.named_parameters():
        param.requires_grad_((vision.tower if part.front.is_tower(name) else vision.projector) == "trained")
    if vision.text == "frozen":
        part.model.requires_grad_(False)


def _trained_names(part: ModelPart) -> dict[str, nn.Parameter]:
    """Return the trained parameters by hub name. Tied parameters have several names."""
    params = part.named_parameters(remove_duplicate=False)
    return {part.hub_name(name): param for name, param in params if param.requires_grad}


def _keep(names: dict[str, nn.Parameter], chosen: set[nn.Parameter]) -> None:
    for param in names.values():
        param.requires_grad_(param in chosen)
