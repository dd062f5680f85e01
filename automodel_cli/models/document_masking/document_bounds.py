"""Documents of packed rows as a batch of rows: which tokens of each input a document gets, and the way back.

`recurrent_layers.py` runs modules with them. Example: a row with documents of 5, 4 and 1 tokens becomes batches of `[2,
5]` and `[1, 1]`.

Shapes: B rows, T tokens (local with context parallelism), N = B*T, M tokens of the full rows, G documents of a group, S
tokens of its longest document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.attention import varlen_segments as segments
from automodel_cli.models.context_parallel_layout import Context

# Document boundaries for kernels of transformers and packed attention. A module that runs per document needs none.
BOUNDARIES = frozenset(
    {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens", "seq_idx", "context"}
)


class Runner(Protocol):
    """Runs a recurrent layer."""

    def run(
        self, layer: nn.Module, forward: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object: ...


class DocumentBounds:
    """The documents of one microbatch, shared by all recurrent layers of a forward and its recomputation."""

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
        """Group the documents.

        Args:
            bounds: boundaries over the flat B*T tokens. Ignored with `context`, which has boundaries of the padded full
                rows.
            by_position: tensors that are not per token but have a dimension of size T (masks, biases, tables) are
                shared by all rows. A document gets their first part.
        """
        self.rows, self.tokens, self.context, self.by_position = rows, tokens, context, by_position
        self._are_rows = context is None and len(bounds) == rows + 1
        # Index of each group's tokens in the flat (gathered) inputs, and of each local token in the joined results.
        self._groups: list[Tensor] = []
        self._back_N = torch.empty(0)
        if context is not None:
            place_M, own_N = context.gathered_index(), context.global_index()
            groups, back_M = segments.group_by_length(_touched(context, own_N), place_M, device)
            self._groups, self._back_N = [group.key_GU for group in groups], back_M[own_N]
        elif not self._are_rows:
            groups, self._back_N = segments.document_groups(segments.HostDocuments(bounds), device)
            self._groups = [group.key_GU for group in groups]

    @classmethod
    def of(cls, inputs: Mapping[str, Any], *, by_position: bool = False) -> DocumentBounds:
        """Create from `Batch.model_inputs()` or the local part of it. One host synchronization on CUDA."""
        rows, tokens = inputs["input_ids"].shape
        cu: Tensor | None = inputs.get("cu_seq_lens_q")
        bounds = tuple(range(0, rows * tokens + 1, tokens)) if cu is None else tuple(cu.tolist())
        device, context = inputs["input_ids"].device, inputs.get("context")
        return cls(rows, tokens, bounds, device, context, by_position=by_position)

    @classmethod
    def equally_long(cls, lengths: Sequence[int], device: torch.device) -> tuple[DocumentBounds, list[list[int]]]:
        """Group documents of one row by equal length, so that the state after each is that of its last token.

        Also returns the indices of the documents in each batch.
        """
        # Example: lengths 2, 1, 2. Documents 0 and 2 run together, document 1 alone: groups [[0, 1], [3, 4]] and [[2]].
        # The outputs come out as tokens 0 1 3 4 2, and `back_N` [0, 1, 4, 2, 3] restores the order.
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        batches = [[i for i, other in enumerate(lengths) if other == length] for length in dict.fromkeys(lengths)]
        documents = cls(1, int(bounds[-1]), (0, int(bounds[-1])), device)
        documents._are_rows = False
        documents._groups = [(bounds[batch][:, None] + torch.arange(lengths[batch[0]])).to(device) for batch in batches]
        documents._back_N = torch.cat([group.flatten() for group in documents._groups]).argsort()
        return documents, batches

    @property
    def are_rows(self) -> bool:
        """Whether every row is one complete document."""
        return self._are_rows

    def run(
        self,
        layer: nn.Module,
        forward: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        of_batches: Sequence[dict[str, object]] | None = None,
    ) -> object:
        """Call `forward(*args, **kwargs)` as if every document were a row.

        Inputs and results are per token. Other outputs (a last state) become None.

        Args:
            of_batches: additional keywords for each call.
        """
        kwargs = {name: value for name, value in kwargs.items() if name not in BOUNDARIES}
        if self.are_rows:
            return forward(*args, **kwargs)
        module = type(layer).__name__
        flat_args = [self._map(module, value) for value in args]
        flat_kwargs = {name: self._map(module, value) for name, value in kwargs.items()}
        outputs = [
            forward(
                *(_pick(value, index) for value in flat_args),
                **{name: _pick(value, index) for name, value in flat_kwargs.items()},
                **own,
            )
            for index, own in zip(self._groups, of_batches or [{}] * len(self._groups), strict=True)
        ]
        return self._scattered(outputs, [tuple(index.shape) for index in self._groups])

    def _map(self, module: str, value: object) -> object:
        """Every tensor, at any depth, as `_PerToken`: `[N, ...]`, or `[M, ...]` gathered from all ranks; or as
        `_ByPosition`."""
        if isinstance(value, Tensor):
            return self._per_token(module, value)
        if isinstance(value, dict):
            return {name: self._map(module, item) for name, item in value.items()}
        return tuple(self._map(module, item) for item in value) if isinstance(value, (tuple, list)) else value

    def _per_token(self, module: str, x: Tensor) -> _PerToken | _ByPosition:
        if not is_per_token(x, self.rows, self.tokens):
            if self.by_position and is_by_position(x, self.tokens):
                return _ByPosition(x, self.rows, self.tokens)
            raise ConfigError(
                f"packing is not supported because {module} receives a tensor of shape {tuple(x.shape)} for "
                f"{self.rows} rows of {self.tokens} tokens, which cannot be split into documents",
                code="not_supported_by_model",
                keys=("data.packing",),
            )
        # [B or 1, T, ...] -> [B * T, ...]. With context parallelism, every rank gets the tokens of all ranks: a
        # recurrence needs all tokens of its document, so their work is repeated on each rank that has one of them.
        flat = x.expand(self.rows, *x.shape[1:]).flatten(0, 1)
        return _PerToken(flat if self.context is None else self.context.group.gather(flat))

    def _scattered(self, outputs: list[object], shapes: list[tuple[int, ...]]) -> object:
        first = outputs[0]
        if isinstance(first, (tuple, list)):
            return tuple(self._scattered(list(same), shapes) for same in zip(*outputs, strict=True))
        tensors = [output for output in outputs if isinstance(output, Tensor)]
        # Compare all calls: one state of 4 heads looks like an output for a document of 4 tokens.
        if [tuple(output.shape[:2]) for output in tensors] != shapes:
            return None
        # [G, S, ...] per group -> [tokens, ...] -> order of the rows -> [B, T, ...].
        whole = torch.cat([output.flatten(0, 1) for output in _equally_wide(tensors)]).index_select(0, self._back_N)
        return whole.unflatten(0, (self.rows, self.tokens))


class _PerToken:
    """A flat input that is indexed per document."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor

    def of_documents(self, index_GS: Tensor) -> Tensor:
        """Return the tokens of each document, `[G, S, ...]`."""
        found: Tensor = self.tensor.index_select(0, index_GS.flatten()).unflatten(0, index_GS.shape)
        return found


class _ByPosition:
    """A mask, bias or table shared by all rows: `[B or 1 or B * H, ..., T, ...]`, or `[T, ...]`."""

    def __init__(self, tensor: Tensor, rows: int, tokens: int):
        self.tokens = tokens
        self.of_each = tensor.dim() > 2 and tensor.shape[0] != tokens and (len(tensor) == 1 or len(tensor) % rows == 0)
        self.tensor = tensor[: max(len(tensor) // rows, 1)] if self.of_each else tensor

    def of_documents(self, index_GS: Tensor) -> Tensor:
        """Return the part for documents of S tokens, repeated for G documents."""
        (documents, length), x = index_GS.shape, self.tensor
        for dim, size in enumerate(x.shape):
            x = x.narrow(dim, 0, length) if size == self.tokens else x
        if not self.of_each:
            return x
        return x.expand(documents, *x.shape[1:]) if len(x) == 1 else x.repeat(documents, *[1] * (x.dim() - 1))


def _equally_wide(outputs: list[Tensor]) -> list[Tensor]:
    """Pad selections `[G, S, k]` of tokens by repeating the last one. Short documents have fewer."""
    width = max(output.shape[-1] for output in outputs)
    if outputs[0].is_floating_point() or outputs[0].dim() < 3 or all(o.shape[-1] == width for o in outputs):
        return outputs
    short = [width - output.shape[-1] for output in outputs]
    return [torch.cat([o, o[..., -1:].expand(*o.shape[:-1], n)], -1) for o, n in zip(outputs, short, strict=True)]


def _pick(value: object, index_GS: Tensor) -> object:
    # Dynamo traces this function in compiled layers, so it has no `match`, which older releases do not support.
    if isinstance(value, (_PerToken, _ByPosition)):
        return value.of_documents(index_GS)
    if isinstance(value, dict):
        return {name: _pick(item, index_GS) for name, item in value.items()}
    return tuple(_pick(item, index_GS) for item in value) if isinstance(value, tuple) else value


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists and dicts."""
    match value:
        case Tensor():
            yield value
        case dict():
            yield from tensors_in(list(value.values()))
        case tuple() | list():
            for item in value:
                yield from tensors_in(item)


def is_per_token(x: Tensor, rows: int, tokens: int) -> bool:
    """Return whether `x` is `[B, T, ...]`, or `[1, T, ...]` for all rows."""
    return x.dim() >= 2 and x.shape[0] in (1, rows) and x.shape[1] == tokens


def is_by_position(x: Tensor, tokens: int) -> bool:
    """Return whether `x` is a mask, bias or table over the positions of a row, or has no dimensions of its own."""
    return x.dim() <= 1 or tokens in x.shape


def _touched(context: Context, own_N: Tensor) -> list[segments.Segment]:
    """Return the documents of the padded full rows that contain local tokens."""
    bounds = torch.tensor(context.bounds, device=own_N.device)
    documents = torch.bucketize(own_N, bounds[1:], right=True).unique().tolist()
    return [segments.Segment(a, b - a, a, b - a, 0) for a, b in (context.bounds[i : i + 2] for i in documents)]
