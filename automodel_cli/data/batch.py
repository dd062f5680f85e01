"""What every model, objective and schedule sees: rows of equal token count, with document boundaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from automodel_cli.data.head_output import LOGPROBS, HeadRequest

IGNORE_INDEX = -100
ROUTED_EXPERTS = "routed_experts_BTC"
"""Column of `Batch.extra` with the experts that each token shall go to: int16, C = layers with experts x experts of a
token, -1 where the router chooses by itself. No objective reads it, the model does."""
ON_HOST = "on_host"
"""Keyword of `Batch.model_inputs` with `OnHost`."""
KEY_INDEX = "key_index"
"""Keyword of `Batch.model_inputs` with `SeenKeys.index_M`, there where documents share a prefix."""


class SeenKeys(NamedTuple):
    """Which keys the documents of a batch see, where some see a run of tokens before their own: a prefix that documents
    share.

    `index_M` int64: tokens of the B*T, those that the first document sees, then those of the second, and so on; of each
    its own tokens last. `cu_seqlens` int32 `[documents + 1]`: where documents begin in it. `max_seqlen` (host int): of
    the longest.
    """

    index_M: Tensor
    cu_seqlens: Tensor
    max_seqlen: int

    @classmethod
    def of(cls, bounds: Sequence[int], prefixes: Sequence[Run]) -> SeenKeys:
        """Documents between `bounds`, each with the run that it sees before its own tokens."""
        lengths = [b - a + more for (a, b), (_, more) in zip(pairwise(bounds), prefixes, strict=True)]
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(seen_index(bounds, prefixes), cu_seqlens, max(lengths))

    @classmethod
    def among(cls, model_inputs: Mapping[str, Any]) -> SeenKeys | None:
        """What `Batch.model_inputs` holds of them."""
        if KEY_INDEX not in model_inputs:
            return None
        return cls(model_inputs[KEY_INDEX], model_inputs["cu_seq_lens_k"], model_inputs["max_length_k"])

    def prefixes(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """First token and number of tokens, int64 `[documents]` each, of what the documents between these bounds see
        before their own."""
        first = self.index_M[self.cu_seqlens[:-1].long().clamp(max=len(self.index_M) - 1)]
        return first, (self.cu_seqlens.diff() - cu_seqlens.diff()).long()


Run = tuple[int, int]
"""(first token of the B*T, number of tokens)"""
NO_RUN: Run = (0, 0)


def seen_index(bounds: Sequence[int], prefixes: Sequence[Run]) -> Tensor:
    """`SeenKeys.index_M`."""
    runs = [run for (a, b), prefix in zip(pairwise(bounds), prefixes, strict=True) for run in (prefix, (a, b - a))]
    first_R, length_R = torch.tensor(runs, dtype=torch.int64).view(-1, 2).unbind(1)
    skipped_R = first_R - length_R.cumsum(0) + length_R  # from a key's place here to its place among the B*T
    return skipped_R.repeat_interleave(length_R) + torch.arange(int(length_R.sum()))


@dataclass(frozen=True)
class OnHost:
    """What the host remembers of a batch that it sent to a device, for ranks that share its rows: bounds of documents,
    and `Batch.label_positions_S` in host memory."""

    cu_seqlens: tuple[int, ...]
    label_positions_S: Tensor


@dataclass(frozen=True)
class Batch:
    """One microbatch: B rows of T tokens. Packing is the normal case; a padded row is one document and one of padding.

    `input_ids_BT`, `position_ids_BT` (in every document from 0, or on from its prefix) and `labels_BT` are int64.
    Labels are already shifted: `labels[b, t]` is the token that follows `input_ids[b, t]` in the same document, or
    `IGNORE_INDEX`. `cu_seqlens` is int32 `[documents + 1]` over the B*T tokens in row-major order; every row start is a
    boundary, and padding at the end of a row is a document of its own. `max_seqlen` (host int) is the longest document.
    `row_ids_B` int64 names the rows for error messages. `extra` holds more columns of the objective, by token `[B, T]`
    (or `[B, T, N]`), document or pair (`objectives/base.py` lists them). `seen`: None where every document sees itself
    alone.
    """

    input_ids_BT: Tensor
    labels_BT: Tensor
    position_ids_BT: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    row_ids_B: Tensor
    extra: dict[str, Tensor] = field(default_factory=dict)
    seen: SeenKeys | None = None
    label_positions_S: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    """Where labels are among the B*T tokens, int64: found on the host by `to` and `pinned`, so that nobody waits for
    the device to say. None before that, and in copies with other tensors (`dataclasses.replace`)."""
    on_host: OnHost | None = field(default=None, init=False, repr=False, compare=False)
    """There where `label_positions_S` is."""

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        rows, tokens = self.input_ids_BT.shape
        return rows, tokens

    @property
    def num_label_tokens(self) -> Tensor:
        """Tokens that are trained on: int64 scalar on the batch's device."""
        return (self.labels_BT != IGNORE_INDEX).sum()

    @property
    def num_documents(self) -> int:
        """Documents of the batch, those of padding included; known on the host."""
        return len(self.cu_seqlens) - 1

    @property
    def document_ids_BT(self) -> Tensor:
        """int64: which document of the batch each token belongs to, 0 to `num_documents - 1`."""
        tokens = torch.arange(self.input_ids_BT.numel(), device=self.cu_seqlens.device, dtype=self.cu_seqlens.dtype)
        return (torch.searchsorted(self.cu_seqlens, tokens, right=True) - 1).view(self.shape)

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`, with `label_positions_S`; copies are asynchronous from pinned memory."""
        return self._with_tensors(lambda t: t.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """The same batch in pinned host memory, for a CUDA device to fetch by itself."""
        return self._with_tensors(lambda t: t.pin_memory())

    def _with_tensors(self, move: Callable[[Tensor], Tensor]) -> Batch:
        positions_S, on_host, seen = self.label_positions_S, self.on_host, self.seen
        if positions_S is None and self.labels_BT.device.type == "cpu":
            positions_S = (self.labels_BT.flatten() != IGNORE_INDEX).nonzero()[:, 0]
            on_host = OnHost(tuple(self.cu_seqlens.tolist()), positions_S)
        moved = replace(
            self,
            input_ids_BT=move(self.input_ids_BT),
            labels_BT=move(self.labels_BT),
            position_ids_BT=move(self.position_ids_BT),
            cu_seqlens=move(self.cu_seqlens),
            row_ids_B=move(self.row_ids_B),
            extra={k: move(v) for k, v in self.extra.items()},
            seen=None if seen is None else SeenKeys(move(seen.index_M), move(seen.cu_seqlens), seen.max_seqlen),
        )
        return moved._at(None if positions_S is None else move(positions_S), on_host)

    def with_columns(self, **columns: Tensor) -> Batch:
        """The same tokens with more columns in `extra`."""
        return replace(self, extra={**self.extra, **columns})._at(self.label_positions_S, self.on_host)

    def without_column(self, name: str) -> Batch:
        """The same tokens without a column of `extra`, if it is there."""
        extra = {key: column for key, column in self.extra.items() if key != name}
        return replace(self, extra=extra)._at(self.label_positions_S, self.on_host)

    def _at(self, label_positions_S: Tensor | None, on_host: OnHost | None) -> Batch:
        object.__setattr__(self, "label_positions_S", label_positions_S)
        object.__setattr__(self, "on_host", on_host)
        return self

    def further_labels(self, by: int) -> Tensor:
        """`[B, T]`: the label of the token `by` places further on in the same document; `IGNORE_INDEX` where it ends
        before."""
        return further(self.labels_BT, by, self.cu_seqlens, IGNORE_INDEX)

    def head_inputs(self, request: HeadRequest = LOGPROBS) -> dict[str, Tensor | HeadRequest | None]:
        """The keywords for the head of the model. A KeyError names a column that is asked for and not there."""
        token_ids_BTN = None if request.token_ids is None else self.extra[request.token_ids]
        return {
            "labels": self.labels_BT,
            "label_positions": self.label_positions_S,
            "request": request,
            "token_ids": token_ids_BTN,
        }

    def model_inputs(self) -> dict[str, Tensor | int | OnHost]:
        """The keywords that every pipeline stage of the model receives (the labels reach only the head)."""
        routed_BTC, seen = self.extra.get(ROUTED_EXPERTS), self.seen
        return {
            **({} if routed_BTC is None else {"routed_experts": routed_BTC}),
            **({} if seen is None else {KEY_INDEX: seen.index_M}),
            **({} if self.on_host is None else {ON_HOST: self.on_host}),
            "input_ids": self.input_ids_BT,
            "position_ids": self.position_ids_BT,
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens if seen is None else seen.cu_seqlens,
            "max_length_q": self.max_seqlen,
            "max_length_k": self.max_seqlen if seen is None else seen.max_seqlen,
        }


Columns = Callable[[list[Batch]], list[Batch]]
"""Returns batches with more columns in `extra`. Collective; every rank brings equally many."""


def unchanged(batches: list[Batch]) -> list[Batch]:
    """The `Columns` of an objective that reads nothing but the rows."""
    return batches


def further(x_BT: Tensor, by: int, cu_seqlens: Tensor, fill: int) -> Tensor:
    """What a column has `by` tokens further on in the same document; `fill` where the document ends before. No host
    synchronisation."""
    x_N = x_BT.flatten()
    token_N = torch.arange(len(x_N), device=x_N.device)
    end_N = cu_seqlens[torch.bucketize(token_N, cu_seqlens[1:], right=True) + 1]
    moved_N = torch.cat([x_N[by:], x_N.new_full((min(by, len(x_N)),), fill)])
    return torch.where(token_N + by < end_N, moved_N, fill).view_as(x_BT)


def one_document(ids: list[int]) -> Batch:
    """A batch of one row that is one document, every token after the first a label: to score any text."""
    ids_BT = torch.tensor([ids], dtype=torch.int64)
    labels_BT = torch.full_like(ids_BT, IGNORE_INDEX)
    labels_BT[:, :-1] = ids_BT[:, 1:]
    return Batch(
        input_ids_BT=ids_BT,
        labels_BT=labels_BT,
        position_ids_BT=torch.arange(len(ids))[None],
        cu_seqlens=torch.tensor([0, len(ids)], dtype=torch.int32),
        max_seqlen=len(ids),
        row_ids_B=torch.zeros(1, dtype=torch.int64),
    )


def dual_chunks(cp_size: int) -> tuple[tuple[int, int], ...]:
    """Which two of `2 * cp_size` equal chunks each rank of context parallelism holds: an early one and its mirror
    image, so that causal attention costs every rank the same."""
    return tuple((rank, 2 * cp_size - 1 - rank) for rank in range(cp_size))
