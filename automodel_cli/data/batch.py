"""One microbatch: sequences of equal length with document boundaries. Models, objectives and schedules read it.

Example. Documents of 3 and 2 tokens and one of 4 fill two sequences of 6 tokens (B = 2, T = 6). `a` to `i` are token
ids, `.` is padding, `x` is `IGNORE_INDEX`. Without a loss mask::

    input_ids_BT     a b c d e .     f g h i . .
    position_ids_BT  0 1 2 0 1 0     0 1 2 3 0 1
    labels_BT        b c x e x x     g h i x x x
    cu_seqlens       0 3 5 6 10 12   five documents: the padding of each sequence is one more
"""

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
"""Column of `Batch.extra` with fixed expert indices: int16, C = MoE layers x experts per token. -1 leaves the choice to
the router. The model reads it, objectives do not."""
ON_HOST = "on_host"
"""Keyword of `Batch.model_inputs` with `OnHost`."""
PICTURES = "pictures"
"""Keyword of `Batch.model_inputs` with `Pictures`, in runs with pictures."""
KEY_INDEX = "key_index"
"""Keyword of `Batch.model_inputs` with `SeenKeys.index_M`. Present if documents share a prefix."""


class SeenKeys(NamedTuple):
    """Keys that each document attends to, if documents share a prefix (GRPO: one prompt, several responses).

    Attributes:
        index_M: indices into the B*T tokens, int64. The keys of the first document, then of the second, and so on. The
            document's tokens follow those of its prefix.
        cu_seqlens: start of each document in `index_M`, int32 `[documents + 1]`.
        max_seqlen: most keys of a document, an int on the host.

    Example: a prompt of 2 tokens (0, 1) and responses of 2 (2, 3) and 1 (4) tokens give `index_M` = 0 1, 0 1 2 3, 0 1 4
    and `cu_seqlens` = 0 2 6 9.
    """

    index_M: Tensor
    cu_seqlens: Tensor
    max_seqlen: int

    @classmethod
    def of(cls, bounds: Sequence[int], prefixes: Sequence[Run]) -> SeenKeys:
        """Build from document bounds and the prefix of each document."""
        lengths = [b - a + more for (a, b), (_, more) in zip(pairwise(bounds), prefixes, strict=True)]
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(seen_index(bounds, prefixes), cu_seqlens, max(lengths))

    @classmethod
    def among(cls, model_inputs: Mapping[str, Any]) -> SeenKeys | None:
        """Read from `Batch.model_inputs`. None: no document shares a prefix."""
        if KEY_INDEX not in model_inputs:
            return None
        return cls(model_inputs[KEY_INDEX], model_inputs["cu_seq_lens_k"], model_inputs["max_length_k"])

    def prefixes(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the first token and the length of each document's prefix, int64 `[documents]` each."""
        first = self.index_M[self.cu_seqlens[:-1].long().clamp(max=len(self.index_M) - 1)]
        return first, (self.cu_seqlens.diff() - cu_seqlens.diff()).long()


Run = tuple[int, int]
"""(first token of the B*T, number of tokens)"""
NO_RUN: Run = (0, 0)


def seen_index(bounds: Sequence[int], prefixes: Sequence[Run]) -> Tensor:
    """Compute `SeenKeys.index_M`."""
    runs = [run for (a, b), prefix in zip(pairwise(bounds), prefixes, strict=True) for run in (prefix, (a, b - a))]
    first_R, length_R = torch.tensor(runs, dtype=torch.int64).view(-1, 2).unbind(1)
    # Example: runs (0, 2), (0, 2), (2, 2) give index 0 1 0 1 2 3. Their starts in the result are 0, 2, 4, so the
    # offsets are 0, -2, -2: result index 2 minus 2 is token 0, result index 4 minus 2 is token 2.
    skipped_R = first_R - length_R.cumsum(0) + length_R  # offset from an index here to an index into the B*T tokens
    return skipped_R.repeat_interleave(length_R) + torch.arange(int(length_R.sum()))


@dataclass(frozen=True)
class OnHost:
    """Host copies of a batch on a device, for ranks that share its sequences: document bounds and
    `Batch.label_positions_S`. They avoid a device synchronization."""

    cu_seqlens: tuple[int, ...]
    label_positions_S: Tensor


@dataclass(frozen=True)
class Pictures:
    """Pictures of a microbatch. Their pixels are read when the model runs, because they are large.

    `inputs`: outputs of the image processor for all pictures in the order of their placeholders. Usually
    `data.pictures.pixels.LazyInputs`, of which nothing is kept after use. `placeholder`: token
    id. `positions_3BT`: rotary positions of time, height and width, of families that have them. `blank_ids_T`: set if
    the microbatch has no picture. `inputs` then belong to one blank picture with these placeholders. `shared_P`: set if
    several runs of placeholders show one picture. `inputs` then have each picture once, in the order of first use. The
    value of each of the P placeholders is its index among the placeholders of these pictures, int64.
    """

    inputs: Mapping[str, Tensor]
    placeholder: int
    positions_3BT: Tensor | None = None
    blank_ids_T: Tensor | None = None
    shared_P: Tensor | None = None


@dataclass(frozen=True)
class Batch:
    """One microbatch of B sequences with T tokens each.

    Sequences are usually packed. A padded sequence holds one document and one document of padding.

    Attributes:
        input_ids_BT: token ids, int64.
        position_ids_BT: positions within each document, int64. They start at 0, or after the shared prefix.
        labels_BT: shifted labels, int64: the next token of the same document, or `IGNORE_INDEX`.
        cu_seqlens: document boundaries over the B*T tokens in row-major order, int32 `[documents + 1]`. Each sequence
            start is a boundary. Padding at the end of a sequence is a separate document.
        max_seqlen: length of the longest document, an int on the host.
        row_ids_B: int64, identifies the sequences in error messages.
        extra: more columns of the objective by token (`[B, T]`, `[B, T, N]`), document or pair. `objectives/base.py`
            lists them.
        seen: keys of each document if documents share a prefix. None: each document attends to itself only.
    """

    input_ids_BT: Tensor
    labels_BT: Tensor
    position_ids_BT: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    row_ids_B: Tensor
    extra: dict[str, Tensor] = field(default_factory=dict)
    seen: SeenKeys | None = None
    pictures: Pictures | None = None
    label_positions_S: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    """Indices of the labels among the B*T tokens, int64. `to` and `pinned` compute them on the host, which avoids a
    device synchronization. None before that, and in copies with other tensors (`dataclasses.replace`)."""
    on_host: OnHost | None = field(default=None, init=False, repr=False, compare=False)
    """Set together with `label_positions_S`."""

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
        """Number of documents including padding, known on the host."""
        return len(self.cu_seqlens) - 1

    @property
    def document_ids_BT(self) -> Tensor:
        """int64: which document of the batch each token belongs to, 0 to `num_documents - 1`."""
        # cu_seqlens 0 3 5 and tokens 0 to 4: searchsorted gives 1 1 1 2 2, minus one 0 0 0 1 1.
        tokens = torch.arange(self.input_ids_BT.numel(), device=self.cu_seqlens.device, dtype=self.cu_seqlens.dtype)
        return (torch.searchsorted(self.cu_seqlens, tokens, right=True) - 1).view(self.shape)

    def to(self, device: torch.device | str) -> Batch:
        """Copy to `device`, with `label_positions_S`. Copies from pinned memory are asynchronous."""
        return self._with_tensors(lambda t: t.to(device, non_blocking=True))

    def pinned(self) -> Batch:
        """Copy to pinned host memory, for asynchronous copies to a CUDA device."""
        return self._with_tensors(lambda t: t.pin_memory())

    def _with_tensors(self, move: Callable[[Tensor], Tensor]) -> Batch:
        positions_S, on_host, seen = self.label_positions_S, self.on_host, self.seen
        # `nonzero` on a device waits for its result to allocate the output. On the host it is free of waits.
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
        """Return a copy with more columns in `extra`."""
        return replace(self, extra={**self.extra, **columns})._at(self.label_positions_S, self.on_host)

    def without_column(self, name: str) -> Batch:
        """Return a copy without a column of `extra`, if present."""
        extra = {key: column for key, column in self.extra.items() if key != name}
        return replace(self, extra=extra)._at(self.label_positions_S, self.on_host)

    def _at(self, label_positions_S: Tensor | None, on_host: OnHost | None) -> Batch:
        # The dataclass is frozen. These two fields are caches that `replace` must not copy to a batch with other
        # labels.
        object.__setattr__(self, "label_positions_S", label_positions_S)
        object.__setattr__(self, "on_host", on_host)
        return self

    def further_labels(self, by: int) -> Tensor:
        """Return the labels `by` tokens later in the same document, `[B, T]`; `IGNORE_INDEX` after its end."""
        return further(self.labels_BT, by, self.cu_seqlens, IGNORE_INDEX)

    def head_inputs(self, request: HeadRequest = LOGPROBS) -> dict[str, Tensor | HeadRequest | None]:
        """Return the keywords for the LM head. Raises KeyError if a requested column is missing."""
        token_ids_BTN = None if request.token_ids is None else self.extra[request.token_ids]
        return {
            "labels": self.labels_BT,
            "label_positions": self.label_positions_S,
            "request": request,
            "token_ids": token_ids_BTN,
        }

    def model_inputs(self) -> dict[str, Tensor | int | OnHost | Pictures]:
        """Return the keywords that every pipeline stage receives. Labels reach only the head."""
        routed_BTC, seen = self.extra.get(ROUTED_EXPERTS), self.seen
        return {
            **({} if routed_BTC is None else {"routed_experts": routed_BTC}),
            **({} if seen is None else {KEY_INDEX: seen.index_M}),
            **({} if self.on_host is None else {ON_HOST: self.on_host}),
            **({} if self.pictures is None else {PICTURES: self.pictures}),
            "input_ids": self.input_ids_BT,
            "position_ids": self.position_ids_BT,
            "cu_seq_lens_q": self.cu_seqlens,
            "cu_seq_lens_k": self.cu_seqlens if seen is None else seen.cu_seqlens,
            "max_length_q": self.max_seqlen,
            "max_length_k": self.max_seqlen if seen is None else seen.max_seqlen,
        }


Columns = Callable[[list[Batch]], list[Batch]]
"""Return batches with more columns in `extra`. Collective: every rank passes the same number of batches."""


def unchanged(batches: list[Batch]) -> list[Batch]:
    """The `Columns` of an objective that needs no more columns."""
    return batches


def further(x_BT: Tensor, by: int, cu_seqlens: Tensor, fill: int) -> Tensor:
    """Shift a column by `by` tokens within each document, and fill the end of the document. No host synchronization.

    Example: `by` 1, `fill` 0 and documents [1, 2, 3], [4, 5] give [2, 3, 0], [5, 0].
    """
    x_N = x_BT.flatten()
    token_N = torch.arange(len(x_N), device=x_N.device)
    # End of the document of each token: cu_seqlens 0 3 5 gives 3 3 3 5 5.
    end_N = cu_seqlens[torch.bucketize(token_N, cu_seqlens[1:], right=True) + 1]
    moved_N = torch.cat([x_N[by:], x_N.new_full((min(by, len(x_N)),), fill)])
    return torch.where(token_N + by < end_N, moved_N, fill).view_as(x_BT)


def one_document(ids: list[int]) -> Batch:
    """Return a batch with one document, in which every token after the first is a label. Used to score a text."""
    ids_BT = torch.tensor([ids], dtype=torch.int64)
    labels_BT = torch.full_like(ids_BT, IGNORE_INDEX)
    # The label of a position is the next token. The last position keeps IGNORE_INDEX.
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
    """Return the two of `2 * cp_size` equal chunks that each context-parallel rank holds: one and its mirror image.

    Causal attention costs more for later tokens. The pairing gives each rank the same cost. Example for `cp_size` 2:
    rank 0 holds the chunks 0 and 3, rank 1 the chunks 1 and 2.
    """
    return tuple((rank, 2 * cp_size - 1 - rank) for rank in range(cp_size))
