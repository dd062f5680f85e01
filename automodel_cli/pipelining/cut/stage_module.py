"""A pipeline stage of an unmodified Hugging Face causal LM, and the stand-ins of modules that it does not have.

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

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from automodel_cli.data.head_output import LOGPROBS, HeadOutput, HeadRequest
from automodel_cli.models.model_part import ModelPart

if TYPE_CHECKING:
    pass


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

    def forward(self, *args: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor | None, ...] | None:
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

    def forward(self, inputs: Tensor, *args: object, **kwargs: object) -> Tensor:
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

    def forward(self, inputs: Tensor, *args: object, **kwargs: object) -> Tensor:
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


def num_streams(part: ModelPart, further: bool) -> int:
    """Return how many hidden states leave a stage with layers for multi-token prediction, concatenated."""
    return 1 + (len(part.depth_names.depths) if further and part.depth_names is not None else 0)
