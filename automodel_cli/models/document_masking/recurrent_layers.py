"""Layers that carry a state from token to token, run document by document: exact on any device.

Gated delta nets, Mamba, short convolutions and linear attention read earlier tokens outside of the attention interface,
so document boundaries do not reach them: the library's torch code ignores them, and its kernels are taken where they
happen to be installed. Here the family's own module is run on the documents of a row as if each were a row: documents
of similar length as one batch, the shorter ones padded on the right by repeating their last token. What a causal module
computes for the padding is thrown away and reaches nothing else. Rows that are one document each run as they are.

Which modules these are is measured (`mixing.py`). `install` gives them a subclass of the same name, and their decoder
layers one that hands them the documents of the microbatch: as a keyword that enters the layer from outside, so that it
survives several microbatches in flight and recomputation, also in families that drop keywords on the way.

Attention of the library's own that reads a mask (sparse attention with an indexer, compressed attention, biases by
position, dropout) is run in the same way, with `by_position`: the model builds its masks for rows that are one document
each, and a document is shown their beginning, which is what it would be given alone.

Under context parallelism a state needs all earlier tokens: each rank gathers the rows, runs the documents of which it
has tokens, and keeps its own tokens' results. The gradients of all ranks are summed where they were gathered.

While a model generates, what runs a state layer is something else that keeps its states (`run_by`).

Shapes: B rows, T tokens (under context parallelism a rank's), N = B*T; M tokens of the whole rows; G documents of a
group, S tokens of its longest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.attention import varlen_segments as segments
from automodel_cli.models.context_parallel_layout import Context

_CURRENT = "_documents_of_microbatch"
_KEYWORD = "documents_of_rows"
# What tells the library's kernels and our attention where documents begin: a module that gets documents needs none.
_BOUNDARIES = frozenset(
    {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens", "seq_idx", "context"}
)


class Runner(Protocol):
    """What a state layer is run by."""

    def run(
        self, layer: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any: ...


class DocumentBounds:
    """The documents of one microbatch, for every state layer of one forward (and of its recomputation)."""

    def __init__(
        self,
        rows: int,
        tokens: int,
        bounds: tuple[int, ...],
        device: torch.device,
        context: Context | None = None,
        *,
        by_position: bool = False,
    ):
        """`bounds` over the flat B*T tokens, or `context`, which has its own over the padded whole rows.

        `by_position`: tensors that are not per token but have a dimension of T (masks, biases, tables) are those of any
        row, of which a document gets the first."""
        self.rows, self.tokens, self.context, self.by_position = rows, tokens, context, by_position
        self._are_rows = context is None and len(bounds) == rows + 1
        # Where each group's tokens lie in the flat (gathered) inputs, and each local token in the groups' results.
        self._groups: list[Tensor] = []
        self._back_N = torch.empty(0)
        if context is not None:
            place_M, own_N = context.gathered_index(), context.whole_index()
            groups, back_M = segments.group_by_length(_touched(context, own_N), place_M, device)
            self._groups, self._back_N = [group.key_GU for group in groups], back_M[own_N]
        elif not self._are_rows:
            groups, self._back_N = segments.document_groups(segments.HostDocuments(bounds), device)
            self._groups = [group.key_GU for group in groups]

    @classmethod
    def of(cls, inputs: Mapping[str, Any], *, by_position: bool = False) -> DocumentBounds:
        """From `Batch.model_inputs()` or a rank's share of it. One host synchronisation on a CUDA device."""
        rows, tokens = inputs["input_ids"].shape
        cu: Tensor | None = inputs.get("cu_seq_lens_q")
        bounds = tuple(range(0, rows * tokens + 1, tokens)) if cu is None else tuple(cu.tolist())
        device, context = inputs["input_ids"].device, inputs.get("context")
        return cls(rows, tokens, bounds, device, context, by_position=by_position)

    @classmethod
    def equally_long(cls, lengths: Sequence[int], device: torch.device) -> tuple[DocumentBounds, list[list[int]]]:
        """Documents of one row of which only those of the same length are run together, so that the state after each is
        that of its last token; and which documents (by their place in the row) the batches hold."""
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        batches = [[i for i, other in enumerate(lengths) if other == length] for length in dict.fromkeys(lengths)]
        documents = cls(1, int(bounds[-1]), (0, int(bounds[-1])), device)
        documents._are_rows = False
        documents._groups = [(bounds[batch][:, None] + torch.arange(lengths[batch[0]])).to(device) for batch in batches]
        documents._back_N = torch.cat([group.flatten() for group in documents._groups]).argsort()
        return documents, batches

    @property
    def are_rows(self) -> bool:
        """Every row is one document, and whole."""
        return self._are_rows

    def run(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        of_batches: Sequence[dict[str, Any]] | None = None,
    ) -> Any:
        """`forward(*args, **kwargs)` as if every document were a row. Inputs and results are per token: what `forward`
        returns besides (a last state) is None in the result. `of_batches`: further keywords, for each call its own."""
        kwargs = {name: value for name, value in kwargs.items() if name not in _BOUNDARIES}
        if self.are_rows:
            return forward(*args, **kwargs)
        module = type(layer).__name__
        flat_args, flat_kwargs = self._map(module, args), self._map(module, kwargs)
        outputs = [
            forward(*_pick(flat_args, index), **_pick(flat_kwargs, index), **own)
            for index, own in zip(self._groups, of_batches or [{}] * len(self._groups), strict=True)
        ]
        return self._scattered(outputs, [tuple(index.shape) for index in self._groups])

    def _map(self, module: str, value: Any) -> Any:
        """Every tensor, at any depth, as `_PerToken`: `[N, ...]`, or `[M, ...]` gathered from all ranks; or as
        `_ByPosition`."""
        if isinstance(value, Tensor):
            return self._per_token(module, value)
        if isinstance(value, dict):
            return {name: self._map(module, item) for name, item in value.items()}
        return tuple(self._map(module, item) for item in value) if isinstance(value, (tuple, list)) else value

    def _per_token(self, module: str, x: Tensor) -> Any:
        if not is_per_token(x, self.rows, self.tokens):
            if self.by_position and is_by_position(x, self.tokens):
                return _ByPosition(x, self.rows, self.tokens)
            raise ConfigError(
                f"packing is not supported because {module} receives a tensor of shape {tuple(x.shape)} for "
                f"{self.rows} rows of {self.tokens} tokens, which cannot be split into documents",
                code="not_supported_by_model",
                keys=("data.packing",),
            )
        flat = x.expand(self.rows, *x.shape[1:]).flatten(0, 1)
        return _PerToken(flat if self.context is None else self.context.group.gather(flat))

    def _scattered(self, outputs: list[Any], shapes: list[tuple[int, ...]]) -> Any:
        first = outputs[0]
        if isinstance(first, (tuple, list)):
            return tuple(self._scattered(list(same), shapes) for same in zip(*outputs, strict=True))
        # Of every call: a state of 4 heads after one call for a document of 4 tokens is not per token.
        if not isinstance(first, Tensor) or [tuple(output.shape[:2]) for output in outputs] != shapes:
            return None
        outputs = _equally_wide(outputs)
        whole = torch.cat([output.flatten(0, 1) for output in outputs]).index_select(0, self._back_N)
        return whole.unflatten(0, (self.rows, self.tokens))


class _PerToken:
    """A flat input that is to be picked per document."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


class _ByPosition:
    """A mask, bias or table, the same for all rows: `[B or 1 or B * H, ..., T, ...]`, or `[T, ...]`."""

    def __init__(self, tensor: Tensor, rows: int, tokens: int):
        self.tokens = tokens
        self.of_each = tensor.dim() > 2 and tensor.shape[0] != tokens and (len(tensor) == 1 or len(tensor) % rows == 0)
        self.tensor = tensor[: max(len(tensor) // rows, 1)] if self.of_each else tensor

    def beginning(self, documents: int, length: int) -> Tensor:
        """Of `length` tokens, for each of so many documents."""
        x = self.tensor
        for dim, size in enumerate(x.shape):
            x = x.narrow(dim, 0, length) if size == self.tokens else x
        if not self.of_each:
            return x
        return x.expand(documents, *x.shape[1:]) if len(x) == 1 else x.repeat(documents, *[1] * (x.dim() - 1))


def _equally_wide(outputs: list[Tensor]) -> list[Tensor]:
    """Selections `[G, S, k]` of the tokens of each document, of which short ones have fewer: the last one repeated."""
    width = max(output.shape[-1] for output in outputs)
    if outputs[0].is_floating_point() or outputs[0].dim() < 3 or all(o.shape[-1] == width for o in outputs):
        return outputs
    short = [width - output.shape[-1] for output in outputs]
    return [torch.cat([o, o[..., -1:].expand(*o.shape[:-1], n)], -1) for o, n in zip(outputs, short, strict=True)]


def _pick(value: Any, index_GS: Tensor) -> Any:
    if isinstance(value, _ByPosition):
        return value.beginning(*index_GS.shape)
    if isinstance(value, _PerToken):
        return value.tensor.index_select(0, index_GS.flatten()).unflatten(0, index_GS.shape)
    if isinstance(value, dict):
        return {name: _pick(item, index_GS) for name, item in value.items()}
    return tuple(_pick(item, index_GS) for item in value) if isinstance(value, tuple) else value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def is_per_token(x: Tensor, rows: int, tokens: int) -> bool:
    """Whether `x` is `[B, T, ...]`, or `[1, T, ...]` for all rows."""
    return x.dim() >= 2 and x.shape[0] in (1, rows) and x.shape[1] == tokens


def is_by_position(x: Tensor, tokens: int) -> bool:
    """Whether `x` is a mask, a bias or a table over the positions of a row, or the same for all of them."""
    return x.dim() <= 1 or tokens in x.shape


def _touched(context: Context, own_N: Tensor) -> list[segments.Segment]:
    """The documents of the padded whole rows of which this rank has tokens."""
    bounds = torch.tensor(context.bounds, device=own_N.device)
    found = torch.bucketize(own_N, bounds[1:], right=True).unique().tolist()
    return [segments.Segment(a, b - a, a, b - a, 0) for a, b in (context.bounds[i : i + 2] for i in found)]


class StateLayer(nn.Module):
    """Over a module of the library that mixes tokens by itself: `forward` stays the same from outside."""

    carries_state = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        runner: Runner | None = getattr(self, _CURRENT, None)
        if runner is None:
            return super().forward(*args, **kwargs)
        return runner.run(self, super().forward, args, kwargs)


class _Holder:
    """What runs the state layers of a model: the documents of the forward that it is in, or `instead` of them."""

    documents: DocumentBounds | None = None
    instead: Runner | None = None
    by_position = False

    @property
    def runner(self) -> Runner | None:
        return self.documents if self.instead is None else self.instead


class _DecoderLayer(nn.Module):
    """Over a decoder layer with state layers in it."""

    _holder: _Holder
    _state_layers: list[nn.Module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Outside of any recomputation: what a layer is called with, it is recomputed with."""
        return super().__call__(*args, **kwargs, **{_KEYWORD: self._holder.runner})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hand_over(self._state_layers, kwargs.pop(_KEYWORD, None))
        try:
            return super().forward(*args, **kwargs)
        finally:
            hand_over(self._state_layers, None)


def hand_over(layers: Collection[nn.Module], runner: Runner | None) -> None:
    """Tell state layers what runs them next; None: whatever they get is to be run as it is."""
    for layer in layers:
        object.__setattr__(layer, _CURRENT, runner)


def install_document_reset(model: nn.Module, classes: Collection[str], *, by_position: bool = False) -> None:
    """Make the modules of these classes (`class_name`), the outermost of each place, look at documents. Without any,
    the model is left as it is. `by_position`: all attention is among them, see `Documents` and `told_of_rows`.

    Raises ConfigError where such a module stands outside of the decoder layers.
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
    """Inside, `model` runs on these inputs, `Batch.model_inputs()` or a rank's share of it."""
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
    """Inside, `runner` runs the state layers of `model`, whatever inputs it is called with."""
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
    """Whether `model`'s attention is the library's own, run document by document."""
    holder: _Holder | None = vars(model).get("_holder")
    return holder is not None and holder.by_position


def told_of_rows(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """`Batch.model_inputs()` for a model that builds the masks of whole rows: with a padding mask without padding, lest
    the library looks for documents by itself."""
    ids_BT: Tensor = inputs["input_ids"]
    rows = {name: value for name, value in inputs.items() if name not in _BOUNDARIES}
    return {**rows, "attention_mask": torch.ones_like(ids_BT)}


def class_name(module: nn.Module) -> str:
    """What a class is called in two models of a family, of which one may come from code beside the weights."""
    cls = next(cls for cls in type(module).__mro__ if not issubclass(cls, (StateLayer, _DecoderLayer)))
    return f"{cls.__module__}.{cls.__qualname__}"


def as_state_layer(module: nn.Module) -> None:
    """Change the class of one module."""
    _swap_class(module, StateLayer)


def _swap_class(module: nn.Module, over: type[nn.Module]) -> None:
    cls = type(module)
    # The same name: the library and peft look some classes up by it.
    module.__class__ = type(cls.__name__, (over, cls), {"__module__": cls.__module__})


def decoder_slots(model: nn.Module) -> Iterator[nn.Module]:
    """The entries of the outermost module lists."""
    for child in model.children():
        yield from child if isinstance(child, nn.ModuleList) else decoder_slots(child)


def outermost(module: nn.Module, classes: Collection[str]) -> list[nn.Module]:
    """The modules of these classes that are in no other one of them."""
    if class_name(module) in classes:
        return [module]
    return [found for child in module.children() for found in outermost(child, classes)]
