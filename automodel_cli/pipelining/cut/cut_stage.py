"""Cut a stage out of a model: keep its layers, and put stand-ins in place of the others (`stage_module`)."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.model_part import ModelPart
from automodel_cli.pipelining.cut.model_structure import (
    LayerOutput,
    ModelStructure,
    SplitError,
    hidden_of,
    tied_embedding,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel
from automodel_cli.pipelining.cut.stage_module import (
    PATCHED,
    Boundary,
    PassThrough,
    Ready,
    StagePart,
    StandIn,
    ZeroOutput,
)


def as_model_part(model: nn.Module, ready: Ready) -> ModelPart:
    """Return `model`, or the part of a transformers model. Raises ConfigError for other types."""
    from transformers import PreTrainedModel

    match model:
        case ModelPart():
            return model
        case PreTrainedModel():
            from automodel_cli.models.lm_head.detection import detect_head
            from automodel_cli.models.lm_head.head import HeadKind

            # The forward of a ready causal LM returns its own logits.
            return ModelPart(model, HeadKind("generic") if ready.outer else detect_head(model.config))
    raise ConfigError(
        f"model must be a ModelPart or a Hugging Face model, not {type(model).__name__}",
        code="wrong_type",
        keys=("model",),
    )


def cut_stage(
    part: ModelPart,
    anatomy: ModelStructure,
    *,
    layers: range,
    is_first: bool,
    is_last: bool,
    holds_depths: bool = False,
    follows_depths: bool = False,
    ready: Ready = PATCHED,
) -> StagePart:
    """Build the stage with `layers` of `part`. The part is not changed. The stage shares its tensors, meta or not."""
    slots = part.model.get_submodule(anatomy.layers).children()
    others = (slot for i, slot in enumerate(slots) if i not in layers)  # Replaced by stand-ins below.
    # The memo makes deepcopy reuse tensors and layers of other stages, so that the copy costs no memory.
    stage = cast(
        StagePart, copy.deepcopy(part, {id(kept): kept for kept in (*part.parameters(), *part.buffers(), *others)})
    )
    stage.__class__ = StagePart
    stage.boundary, stage.layers, stage.is_first, stage.is_last = Boundary(), layers, is_first, is_last
    stage.streams = anatomy.streams
    stage.holds_depths, stage.follows_depths = holds_depths, follows_depths
    stage.ready = ready
    stage.may_train_nothing = any(param.requires_grad for param in part.parameters())
    if not holds_depths:
        stage.multi_token = None
    if ready.inner:
        _keep_own_layers(stage, anatomy.layers)
    else:
        _fill_slots(stage, anatomy)
    model = stage.model
    base = model.base_model_prefix
    dtype = next(part.parameters()).dtype
    table, is_tied = _table(model)
    if is_tied:
        _refuse_adapted_table(model)
    # Stages with the embedding table: the first, the one with multi-token prediction, and the last if its head is tied.
    keeps_table = is_first or holds_depths or (is_last and is_tied)
    if keeps_table and not is_first:
        _copy_table(model, table)
    if not is_first:
        stage.front = None
        for name in anatomy.before:
            # The weight of the head, or the embedding of multi-token prediction.
            if not (keeps_table and name == table):
                absent = _discard_output(model.get_submodule(name), stage.boundary, dtype)
                _replace(model, name, None if ready.reaches(name, base) else absent)
    if not is_last:
        stage.value_head = None
        model.all_tied_weights_keys = {}  # Otherwise transformers would tie the head to a stand-in.
    head = model.get_output_embeddings()
    for name in anatomy.after:
        kept = is_last if not (holds_depths or follows_depths) or model.get_submodule(name) is head else holds_depths
        if not kept:
            _replace(model, name, None if ready.reaches(name, base) else PassThrough())
    if keeps_table and _is_shared(part, is_first=is_first, is_last=is_last, holds_depths=holds_depths):
        stage.shared = frozenset({f"model.{table}.weight"})
        stage.held_elsewhere = frozenset() if is_first else stage.shared
    return stage


def _is_shared(part: ModelPart, *, is_first: bool, is_last: bool, holds_depths: bool) -> bool:
    """Return whether another stage also has the table of this stage."""
    if not is_first:
        return True
    tied_elsewhere = tied_embedding(part.model) is not None and not is_last
    return tied_elsewhere or (part.multi_token is not None and not holds_depths)


def _refuse_adapted_table(model: PreTrainedModel) -> None:
    if hasattr(model.get_input_embeddings(), "base_layer"):
        raise ConfigError(
            "mesh.pp_size above 1 is not supported with an adapter or new tokens on a tied embedding, because the "
            "first and the last stage have a copy of it",
            code="unsupported_combination",
            keys=("model.lora", "mesh.pp_size"),
            fix="mesh.pp_size=1",
        )


def _table(model: PreTrainedModel) -> tuple[str, bool]:
    """Return the name of the input embedding (empty if there is none), and whether it is tied to the head."""
    tied = tied_embedding(model)
    if tied is not None:
        return tied, True
    embedding = model.get_input_embeddings()
    return next((name for name, module in model.named_modules() if module is embedding), ""), False


def _copy_table(model: PreTrainedModel, embedding: str) -> None:
    """Give the stage its own copy of the table. With a V placement, the first stage on the same rank has the other."""
    table, head = model.get_submodule(embedding), model.get_output_embeddings()
    head = getattr(head, "base_layer", head)  # An adapter around it exposes the weight only.
    weight = cast(nn.Parameter, table.weight)
    table.weight = nn.Parameter(weight.detach().clone(), weight.requires_grad)
    if head is not None and head.weight is weight:
        head.weight = table.weight


def _keep_own_layers(stage: StagePart, name: str) -> None:
    layers = list(stage.model.get_submodule(name).children())
    _replace(stage.model, name, nn.ModuleDict({str(i): layers[i] for i in stage.layers}))


def _fill_slots(stage: StagePart, anatomy: ModelStructure) -> None:
    slots = stage.model.get_submodule(anatomy.layers)
    if not isinstance(slots, nn.ModuleList):
        raise SplitError(
            stage.model,
            f"{anatomy.layers} is a {type(slots).__name__}, which cannot contain stand-ins. A base model whose "
            "forward takes and returns hidden states needs patch_inner_model=False",
        )
    # Example: layers 2 and 3 of 6 in the middle of a pipeline. Slot 1 enters, slots 2 and 3 run, slot 4 leaves, and
    # slots 0 and 5 pass through.
    first, end = stage.layers.start, stage.layers.stop
    for i, layer in enumerate(list(slots)):
        if i not in stage.layers:
            role = (
                "enter"
                if i == first - 1 and not stage.is_first
                else "leave"
                if i == end and not _ends_decoder(stage)
                else None
            )
            slots[i] = StandIn(layer, stage.boundary, role, anatomy.arity)
    # At the ends of the list, no stand-in precedes or follows the layers of the stage.
    enters, leaves = first == 0 and not stage.is_first, end == len(slots) and not _ends_decoder(stage)
    for i in stage.layers:
        if (enters and i == first) or (leaves and i == end - 1):
            _attach(slots[i], stage.boundary, enters and i == first, leaves and i == end - 1)


def _ends_decoder(stage: StagePart) -> bool:
    """Return whether the modules after the layers run in this stage."""
    return stage.is_last or stage.holds_depths


def _attach(layer: nn.Module, boundary: Boundary, enters: bool, leaves: bool) -> None:
    """Make a layer read the received hidden states, or capture its output.

    Its class is replaced by a subclass of the same name with another `__call__`, which is outside any recomputation. A
    hook would run inside it on some versions of transformers.
    """
    original = type(layer)

    def call(self: nn.Module, hidden_states: Tensor, *args: object, **kwargs: object) -> LayerOutput:
        output: LayerOutput = original.__call__(self, boundary.hidden_BTD if enters else hidden_states, *args, **kwargs)
        if leaves:
            boundary.hidden_BTD = hidden_of(output)
        return output

    layer.__class__ = type(original.__name__, (original,), {"__call__": call, "__module__": original.__module__})


def _discard_output(module: nn.Module, boundary: Boundary, dtype: torch.dtype) -> nn.Module:
    module = getattr(module, "base_layer", module)  # An adapter around it has the same shape.
    match module:
        case nn.Embedding():
            return ZeroOutput(module.embedding_dim, boundary, dtype)
        case nn.Linear():
            return ZeroOutput(module.out_features, boundary, dtype)
    return PassThrough()


def _replace(model: nn.Module, name: str, new: nn.Module | None) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
