"""Build a pipeline stage from an unmodified Hugging Face causal LM.

Every slot of the decoder list stays. Slots of other stages contain stand-ins without parameters. So the model's own
loop over layers, its `config.layer_types[i]` lookups, its rotary and mask code keep working, and parameter names are
those of the hub.

Example: stage 1 of 6 layers with the layers 2 and 3::

    slot    0         1        2      3      4        5
            StandIn   enter    layer  layer  leave    StandIn
                      received               captured
                      hidden                 hidden

The "enter" stand-in returns the hidden states of the previous stage, whatever the model computed from its (zero)
embeddings. The "leave" stand-in captures the result. Every stage receives the same batch keywords.

Modules before the decoder (embedding, position table, its norm) belong to the first stage, modules after it (final
norm, head) to the last one. They are observed on a small copy (`model_structure`), not derived from names.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.head_output import LOGPROBS, HeadOutput, HeadRequest
from automodel_cli.models.model_part import ModelPart
from automodel_cli.pipelining.cut.model_structure import ModelStructure, SplitError, tied_embedding

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Ready:
    """Forwards of a model that take and return hidden states themselves, so that they need no stand-ins.

    `inner` is the forward of the base model, `outer` that of the causal LM around it. A ready forward receives hidden
    states `[B, T, D]` in place of `input_ids` if its embedding is None, and returns hidden states if its head is None.
    The decoder list of a ready `inner` is a ModuleDict of the layers of the stage by their index in the model.
    """

    inner: bool = False
    outer: bool = False

    def reaches(self, name: str, base: str) -> bool:
        """Return whether a ready forward calls the module `name`. `base` is the name of the base model."""
        return self.inner if name.startswith(base + ".") else self.outer


PATCHED = Ready()
"""A model of transformers, whose forwards do not support stages."""


class Boundary:
    """The hidden states during the forward of one stage: first the received ones, then the ones to send."""

    def __init__(self) -> None:
        self.hidden_BTD: Tensor | None = None

    def take(self) -> Tensor:
        hidden_BTD, self.hidden_BTD = self.hidden_BTD, None
        assert hidden_BTD is not None, "the decoder loop did not reach this stage's boundary"
        return hidden_BTD


class StandIn(nn.Module):
    """Replaces a decoder layer of another stage. Keeps the attributes and properties that the loop of a model may read.

    `role`: "enter" returns the received hidden states, "leave" captures the result, None returns its input.
    """

    def __init__(self, original: nn.Module, boundary: Boundary, role: str | None, arity: int | None):
        super().__init__()
        self.original_class, self.boundary, self.role, self.arity = type(original), boundary, role, arity
        for name, value in vars(original).items():
            if not name.startswith("_") and name not in vars(self):
                self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        # Some loops read class attributes and properties of the layer (`attention_type`, `block_type`).
        value = getattr(vars(self).get("original_class"), name, None)
        if isinstance(value, property) and value.fget:
            return value.fget(self)
        return super().__getattr__(name) if value is None or callable(value) else value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden_BTD = args[0] if args else kwargs["hidden_states"]
        if self.role == "enter":
            hidden_BTD = self.boundary.hidden_BTD
        elif self.role == "leave":
            self.boundary.hidden_BTD = hidden_BTD
        # Layers of some families return a tuple. The loop of the family reads its first entry only.
        return hidden_BTD if self.arity is None else (hidden_BTD,) + (None,) * (self.arity - 1)


class ZeroOutput(nn.Module):
    """Replaces an embedding or projection whose result this stage does not use. Returns zeros of the same shape."""

    def __init__(self, width: int, boundary: Boundary, dtype: torch.dtype):
        super().__init__()
        self.width, self.boundary, self.dtype = width, boundary, dtype

    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        shape = inputs.shape[:-1] if inputs.is_floating_point() else inputs.shape
        return self.weight.new_zeros(*shape, self.width, device=inputs.device)

    @property
    def weight(self) -> Tensor:
        """An empty tensor, for models that read the device and dtype of their embedding."""
        # The received tensor has the compute dtype (mixed precision casts it), which masks and rotary tables use.
        hidden_BTD = self.boundary.hidden_BTD
        return torch.empty(0, dtype=self.dtype) if hidden_BTD is None else hidden_BTD.new_empty(0)


class PassThrough(nn.Module):
    """Replaces a norm, a head, or another module whose result this stage does not use."""

    def forward(self, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return inputs


class StagePart(ModelPart):
    """Consecutive decoder layers of a `ModelPart`, with the embedding on the first stage and the head on the last one.

    Created by `cut_stage` only. `forward(hidden_BTD, labels=..., **model_inputs)` takes the hidden states of the
    previous stage (None on the first one). It returns hidden states, or the `HeadOutput` on the last stage.
    """

    boundary: Boundary
    layers: range
    is_first: bool
    is_last: bool
    streams: tuple[int, ...] = ()
    """See `ModelStructure`. Streams are concatenated between stages, `[B, T, streams * D]`."""
    holds_depths: bool = False
    """Whether the stage has the layers for multi-token prediction, and the last norm before them."""
    follows_depths: bool = False
    """Whether an earlier stage has them. It sends their hidden states in addition to the model's."""
    shared: frozenset[str] = frozenset()
    """Names of embedding tables that several stages have: the first one for its input, the last one if its head is
    tied, and the one with layers for multi-token prediction.
    """
    held_elsewhere: frozenset[str] = frozenset()
    """The same names on all but the first stage, so that the gradient norm counts a shared table once."""
    ready: Ready = PATCHED

    def forward(  # type: ignore[override]
        self,
        hidden_BTD: Tensor | None = None,
        *,
        labels: Tensor,
        label_positions: Tensor | None = None,
        request: HeadRequest = LOGPROBS,
        token_ids: Tensor | None = None,
        **model_inputs: Any,
    ) -> HeadOutput | Tensor:
        if not (self.is_first or self.is_last or self.layers or self.holds_depths):
            assert hidden_BTD is not None, "a stage without layers passes on what it receives"
            return hidden_BTD.clone()  # The backward needs an output that is neither the input leaf nor a view of it.
        if hidden_BTD is not None and self.streams:
            # [B, T, streams * D] -> [B, T, streams, D]: between stages, several residual streams travel as one tensor.
            hidden_BTD = hidden_BTD.unflatten(-1, (*self.streams, -1))
        self.boundary.hidden_BTD = hidden_BTD
        if self.is_last:
            result = super().forward(
                None,
                labels=labels,
                label_positions=label_positions,
                request=request,
                token_ids=token_ids,
                **model_inputs,
            )
            self.boundary.hidden_BTD = None
            return result
        inputs = self.local_inputs(model_inputs)
        if self.holds_depths:
            every = self.with_depths(model_inputs, inputs, request)
            self.boundary.hidden_BTD = None
            return torch.cat(every, -1)
        self.hidden(inputs)
        return self.boundary.take().flatten(2)

    def hidden(self, local_inputs: dict[str, object]) -> Tensor:
        """See `ModelPart.hidden`.

        A ready forward receives the hidden states of the previous stage in place of `input_ids`.
        """
        if self.ready == PATCHED:
            return super().hidden(local_inputs)
        if self.ready.inner and not self.is_first:
            local_inputs = {**local_inputs, "input_ids": self.boundary.hidden_BTD}
        calls_outer = self.ready.outer and not self.is_last
        hidden_BTD = self.run(self.model if calls_outer else self.model.base_model, local_inputs)
        self.boundary.hidden_BTD = hidden_BTD
        return hidden_BTD

    def with_depths(
        self, model_inputs: dict[str, object], local_inputs: dict[str, object], request: HeadRequest
    ) -> list[Tensor]:
        if not self.follows_depths:
            return super().with_depths(model_inputs, local_inputs, request)
        # [B, T, (1 + M) * D] -> M + 1 tensors [B, T, D]: the model's hidden states, and those of each depth.
        return list(self.hidden(local_inputs).chunk(num_streams(self, request.further), -1))


def as_model_part(model: nn.Module, ready: Ready) -> ModelPart:
    """Return `model`, or the part of a transformers model. Raises ConfigError for other types."""
    from transformers import PreTrainedModel

    if isinstance(model, ModelPart):
        return model
    if isinstance(model, PreTrainedModel):
        from automodel_cli.models.lm_head.detection import detect_head
        from automodel_cli.models.lm_head.head import HeadKind

        # The forward of a ready causal LM returns its own logits.
        return ModelPart(model, HeadKind("generic") if ready.outer else detect_head(model.config))
    raise ConfigError(
        f"model must be a ModelPart or a Hugging Face model, not {type(model).__name__}",
        code="wrong_type",
        keys=("model",),
    )


def num_streams(part: ModelPart, further: bool) -> int:
    """Return how many hidden states leave a stage with layers for multi-token prediction, concatenated."""
    return 1 + (len(part.depth_names.depths) if further and part.depth_names is not None else 0)


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
    stage = copy.deepcopy(part, {id(kept): kept for kept in (*part.parameters(), *part.buffers(), *others)})
    stage.__class__ = StagePart
    assert isinstance(stage, StagePart)
    stage.boundary, stage.layers, stage.is_first, stage.is_last = Boundary(), layers, is_first, is_last
    stage.streams = anatomy.streams
    stage.holds_depths, stage.follows_depths = holds_depths, follows_depths
    stage.ready = ready
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
    weight = table.weight
    assert isinstance(weight, nn.Parameter)
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

    def call(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = original.__call__(self, boundary.hidden_BTD if enters else hidden_states, *args, **kwargs)
        if leaves:
            boundary.hidden_BTD = output[0] if isinstance(output, tuple) else output
        return output

    layer.__class__ = type(original.__name__, (original,), {"__call__": call, "__module__": original.__module__})


def _discard_output(module: nn.Module, boundary: Boundary, dtype: torch.dtype) -> nn.Module:
    module = getattr(module, "base_layer", module)  # An adapter around it has the same shape.
    if isinstance(module, nn.Embedding):
        return ZeroOutput(module.embedding_dim, boundary, dtype)
    if isinstance(module, nn.Linear):
        return ZeroOutput(module.out_features, boundary, dtype)
    return PassThrough()


def _replace(model: nn.Module, name: str, new: nn.Module | None) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
