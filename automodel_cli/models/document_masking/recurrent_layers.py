"""Recurrent layers on packed rows: run document by document, exact on any device.

Gated delta nets, Mamba, short convolutions and linear attention read earlier tokens outside of the attention interface.
Document boundaries do not reach them: the torch code of transformers ignores boundaries, and its kernels are optional.
Here, the module of the family runs on documents as if each were a row. Documents of similar length form a batch, padded
on the right by repeating their last token. In a causal module, padding does not affect other tokens, and its outputs
are discarded. Rows with one document run unchanged.

Example: a row with documents of 5, 4 and 1 tokens becomes a batch `[2, 5]` and a batch `[1, 1]`.

`token_mixing.py` detects these modules. `install_document_reset` replaces their class by a subclass of the same name.
Their decoder layers get a subclass that passes the documents as a keyword. A keyword enters the layer from outside, so
it is correct with several microbatches in flight and with recomputation.

Attention that reads a mask (sparse attention with an indexer, compressed attention, position biases, dropout) runs in
the same way with `by_position`. The model builds masks for rows of one document each, and each document gets the first
part of the mask, which is what it would get alone.

With context parallelism, a state needs all earlier tokens. Each rank gathers the rows, runs the documents of its tokens
and keeps the results of its tokens. Gradients are summed over the ranks.

During generation, another runner stores the states (`run_by`).

Shapes: B rows, T tokens (local with context parallelism), N = B*T, M tokens of the full rows, G documents of a group, S
tokens of its longest document.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from automodel_cli.models.document_masking.document_bounds import BOUNDARIES, DocumentBounds, Runner

_CURRENT = "_documents_of_microbatch"
_KEYWORD = "documents_of_rows"


class StateLayer(nn.Module):
    """Subclass of a transformers module that mixes tokens by itself. The signature of `forward` is unchanged."""

    carries_state = True

    def forward(self, *args: object, **kwargs: object) -> object:
        runner: Runner | None = getattr(self, _CURRENT, None)
        if runner is None:
            return super().forward(*args, **kwargs)
        return runner.run(self, super().forward, args, kwargs)


class _Holder:
    """Selects the runner of a model: the documents of the current forward, or `instead`."""

    documents: DocumentBounds | None = None
    instead: Runner | None = None
    by_position = False

    @property
    def runner(self) -> Runner | None:
        return self.documents if self.instead is None else self.instead


class _DecoderLayer(nn.Module):
    """Subclass of a decoder layer that contains recurrent layers."""

    _holder: _Holder
    _state_layers: list[nn.Module]

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Add the runner as a keyword outside of checkpointing, so that recomputation uses the same one."""
        # In backward, another microbatch may be current. The keyword is an input of the checkpoint, so it is repeated
        # exactly.
        return super().__call__(*args, **kwargs, **{_KEYWORD: self._holder.runner})

    def forward(self, *args: object, **kwargs: object) -> object:
        assign_runner(self._state_layers, cast(Runner | None, kwargs.pop(_KEYWORD, None)))
        try:
            return super().forward(*args, **kwargs)
        finally:
            assign_runner(self._state_layers, None)


def assign_runner(layers: Collection[nn.Module], runner: Runner | None) -> None:
    """Set the runner of recurrent layers for the next call. None: call them unchanged."""
    for layer in layers:
        object.__setattr__(layer, _CURRENT, runner)


def install_document_reset(model: nn.Module, classes: Collection[str], *, by_position: bool = False) -> None:
    """Make the outermost modules of these classes (`class_name`) document-aware. Without any, the model is not changed.

    `by_position`: all attention is among them, see `DocumentBounds` and `full_row_inputs`. Only modules inside decoder
    layers are replaced.
    """
    holder = _Holder()
    holder.by_position = by_position
    for slot in decoder_slots(model):
        found = outermost(slot, classes)
        for module in found:
            as_state_layer(module)
        if found:
            _swap_class(slot, _DecoderLayer)
            object.__setattr__(slot, "_holder", holder)
            object.__setattr__(slot, "_state_layers", found)
            object.__setattr__(model, "_holder", holder)


@contextmanager
def documents_of(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Run `model` inside the context on these inputs: `Batch.model_inputs()` or the local part of it."""
    holder: _Holder | None = vars(model).get("_holder")
    if holder is None or holder.instead is not None:
        yield
        return
    holder.documents = DocumentBounds.of(inputs, by_position=holder.by_position)
    try:
        yield
    finally:
        holder.documents = None


@contextmanager
def run_by(model: nn.Module, runner: Runner) -> Iterator[None]:
    """Use `runner` for the recurrent layers of `model` inside the context, for any inputs."""
    holder: _Holder | None = vars(model).get("_holder")
    if holder is None:
        yield
        return
    holder.instead = runner
    try:
        yield
    finally:
        holder.instead = None


def runs_by_document(model: nn.Module) -> bool:
    """Return whether the attention of `model` is that of transformers, run document by document."""
    holder: _Holder | None = vars(model).get("_holder")
    return holder is not None and holder.by_position


def full_row_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return `Batch.model_inputs()` for a model that builds masks of full rows.

    Contains a padding mask without padding, so that transformers does not search for documents.
    """
    ids_BT: Tensor = inputs["input_ids"]
    rows = {name: value for name, value in inputs.items() if name not in BOUNDARIES}
    return {**rows, "attention_mask": torch.ones_like(ids_BT)}


def class_name(module: nn.Module) -> str:
    """Return the class name that is equal in two models of a family, also for remote code."""
    cls = next(cls for cls in type(module).__mro__ if not issubclass(cls, (StateLayer, _DecoderLayer)))
    return f"{cls.__module__}.{cls.__qualname__}"


def as_state_layer(module: nn.Module) -> None:
    """Replace the class of one module by a `StateLayer` subclass."""
    _swap_class(module, StateLayer)


def _swap_class(module: nn.Module, over: type[nn.Module]) -> None:
    cls = type(module)
    # Keep the name, because transformers and peft look up some classes by name.
    module.__class__ = type(cls.__name__, (over, cls), {"__module__": cls.__module__})


def decoder_slots(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the entries of the outermost module lists."""
    for child in model.children():
        yield from child if isinstance(child, nn.ModuleList) else decoder_slots(child)


def outermost(module: nn.Module, classes: Collection[str]) -> list[nn.Module]:
    """Return the modules of these classes that are not inside another one of them."""
    if class_name(module) in classes:
        return [module]
    return [found for child in module.children() for found in outermost(child, classes)]
