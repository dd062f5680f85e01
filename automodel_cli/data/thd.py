"""Sequences laid out for variable-length attention kernels (THD: tokens, heads, width).

For trainers that hold token lists, as reinforcement learning does. (The packed `Batch` needs none of this: its
`cu_seqlens` are such a kernel's boundaries already, and the part cuts rows itself.) The rules:

1. Under context parallelism every sequence is padded to a multiple of `2 * cp_size`, so that each rank can take two
   mirrored chunks of every sequence.
2. A row is as long as the longest one, and at least `min_seq_len`; its last sequence absorbs the tail in the padded
   lengths.
3. Labels are the ids themselves, not shifted; `IGNORE_INDEX` on all padding, and where `token_mask` is below 0.5.
4. `cu_seqlens` counts real tokens (slices what the trainer has per token); `cu_seqlens_padded_per_row` slices what the
   model returns (divided by `cp_size` on each rank).
5. Position ids start again in every sequence and run on through its own padding; 0 in the tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automodel_cli.config.errors import DataError
from automodel_cli.data.batch import IGNORE_INDEX, dual_chunks

RAGGED = -1000
"""Fills the tables of lengths in rows that hold fewer sequences than another."""


class TokenAxis(Protocol):
    def get_local_rank(self) -> int: ...


class Meshes(Protocol):
    """The mesh of a run, as far as it matters here."""

    @property
    def cp(self) -> TokenAxis: ...


@dataclass(frozen=True)
class THDBatch:
    """Rows of packed sequences, whole or one context-parallel rank's share of them.

    `input_ids`, `position_ids`, `labels` are int64 `[rows, tokens]`. `cu_seqlens` int32 `[sequences + 1]` are the real
    boundaries, of all rows one after another; `cu_seqlens_per_row` and `cu_seqlens_padded_per_row` int32
    `[rows, most sequences + 1]` those within each row, filled up with `RAGGED`. Boundaries and `max_seqlen` int32
    `[rows]`, the longest padded sequence, are those of whole rows also in a share. `cp_rank` None: not yet cut.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    cu_seqlens_per_row: Tensor
    cu_seqlens_padded_per_row: Tensor
    n_packed_rows: int
    cp_size: int
    cp_rank: int | None
    max_seqlen: Tensor

    def model_kwargs(self) -> dict[str, Tensor | str]:
        """Keywords of a model with a THD kernel, a row each in dim 0; `cu_seqlens` are those of the padded tokens. A
        pipeline cuts them row by row, and `squeeze_row` makes one row what the kernel takes."""
        return {
            "input_ids": self.input_ids,
            "labels": self.labels,
            "position_ids": self.position_ids,
            "cu_seqlens": self.cu_seqlens_padded_per_row,
            "qkv_format": "thd",
            "max_seqlen": self.max_seqlen,
        }


def squeeze_row(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`module.register_forward_pre_hook(squeeze_row, with_kwargs=True)`: drops the leading 1 of a chunk that is one
    row, and what fills up its boundaries."""
    if kwargs.get("qkv_format") != "thd" or kwargs["input_ids"].dim() == 1:
        return args, kwargs
    assert len(kwargs["input_ids"]) == 1, f"a chunk of {len(kwargs['input_ids'])} rows where THD takes one"
    squeezed = {name: x.squeeze(0) if isinstance(x, Tensor) else x for name, x in kwargs.items()}
    squeezed["cu_seqlens"] = squeezed["cu_seqlens"][squeezed["cu_seqlens"] != RAGGED]
    return args, squeezed


def pack_for_thd(
    ids: Tensor,
    lengths: Sequence[int],
    sequences_per_row: Sequence[int],
    pad_id: int,
    min_seq_len: int = 0,
    num_chunks: int = 1,
    cp_size: int = 1,
    meshes: Meshes | None = None,
    token_mask: Tensor | None = None,
) -> THDBatch:
    """Lay out sequences, given one after another in `ids` `[sum(lengths)]`, in rows of `sequences_per_row` each.

    `num_chunks`: of a pipeline step, which the rows must divide into. With `meshes` the result is this rank's share
    under context parallelism (see `share`), without it whole rows. `token_mask` `[sum(lengths)]`: what is trained on,
    at 0.5 and above. Raises DataError where the numbers do not add up.
    """
    _check(ids, lengths, sequences_per_row, num_chunks, token_mask)
    multiple = 2 * cp_size if cp_size > 1 else 1
    first_of_row = [0, *accumulate(sequences_per_row)]
    labels = ids if token_mask is None else ids.masked_fill(token_mask < 0.5, IGNORE_INDEX)
    pieces_of_ids, pieces_of_labels = ids.split(list(lengths)), labels.split(list(lengths))
    padded = [_up(length, multiple) for length in lengths]
    rows = [padded[a:b] for a, b in pairwise(first_of_row)]
    num_tokens = _up(max(min_seq_len, *(sum(row) for row in rows)), multiple)
    with_tail = [[*row[:-1], row[-1] + num_tokens - sum(row)] for row in rows]
    sizes = [size for row in with_tail for size in row]

    def lay_out(pieces: Sequence[Tensor], fill: int) -> Tensor:
        filled = [F.pad(piece, (0, size - len(piece)), value=fill) for piece, size in zip(pieces, sizes, strict=True)]
        return torch.cat(filled).view(len(rows), num_tokens)

    batch = THDBatch(
        input_ids=lay_out(pieces_of_ids, pad_id),
        position_ids=lay_out([torch.arange(size, device=ids.device) for size in padded], 0),
        labels=lay_out(pieces_of_labels, IGNORE_INDEX),
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=ids.device),
        cu_seqlens_per_row=_table([lengths[a:b] for a, b in pairwise(first_of_row)], ids.device),
        cu_seqlens_padded_per_row=_table(with_tail, ids.device),
        n_packed_rows=len(rows),
        cp_size=cp_size,
        cp_rank=None,
        max_seqlen=torch.tensor([max(row) for row in with_tail], dtype=torch.int32, device=ids.device),
    )
    return batch if meshes is None else share(batch, meshes.cp.get_local_rank())


def share(batch: THDBatch, cp_rank: int) -> THDBatch:
    """The tokens of one context-parallel rank: two mirrored chunks of every sequence, so that each rank sees the same
    amount of causal attention."""
    indices = []
    for bounds in batch.cu_seqlens_padded_per_row.tolist():
        sequences = pairwise(bound for bound in bounds if bound != RAGGED)
        chosen = [dual_chunk_order(end - start, batch.cp_size)[cp_rank] + start for start, end in sequences]
        indices.append(torch.cat(chosen))
    index = torch.stack(indices).to(batch.input_ids.device)
    return replace(
        batch,
        input_ids=batch.input_ids.gather(1, index),
        position_ids=batch.position_ids.gather(1, index),
        labels=batch.labels.gather(1, index),
        cp_rank=cp_rank,
    )


def dual_chunk_order(length: int, cp_size: int) -> Tensor:
    """Which tokens of one sequence each rank holds: int64 `[cp_size, length / cp_size]`. Raises DataError for a length
    that `2 * cp_size` does not divide."""
    if length % (2 * cp_size) and cp_size > 1:
        raise DataError(
            f"a sequence of {length} tokens is not divisible into 2 * cp_size = {2 * cp_size} chunks",
            code="not_divisible",
            fix=f"pad it to {_up(length, 2 * cp_size)} tokens, as pack_for_thd does",
        )
    if cp_size == 1:
        return torch.arange(length)[None]
    chunks = torch.arange(length).chunk(2 * cp_size)
    return torch.stack([torch.cat([chunks[early], chunks[late]]) for early, late in dual_chunks(cp_size)])


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _table(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Boundaries of every row, filled up to the longest."""
    width = max(len(row) for row in rows) + 1
    bounds = [[0, *accumulate(row)] for row in rows]
    filled = [[*row, *[RAGGED] * (width - len(row))] for row in bounds]
    return torch.tensor(filled, dtype=torch.int32, device=device)


def _check(
    ids: Tensor, lengths: Sequence[int], sequences_per_row: Sequence[int], num_chunks: int, token_mask: Tensor | None
) -> None:
    if sum(lengths) != len(ids) or min(lengths, default=0) < 1:
        raise DataError(
            f"lengths={list(lengths)} must be positive and sum to the number of ids, {len(ids)}",
            code="batch_shape",
            keys=("lengths",),
            fix="pass one length per sequence",
        )
    if sum(sequences_per_row) != len(lengths) or min(sequences_per_row, default=0) < 1:
        raise DataError(
            f"sequences_per_row={list(sequences_per_row)} must be positive and sum to the number of sequences, "
            f"{len(lengths)}",
            code="batch_shape",
            keys=("sequences_per_row",),
            fix="pass the number of sequences of each row",
        )
    if len(sequences_per_row) % num_chunks:
        raise DataError(
            f"{len(sequences_per_row)} rows are not divisible into num_chunks={num_chunks}",
            code="not_divisible",
            keys=("num_chunks",),
            fix=f"pass num_chunks={len(sequences_per_row)}",
        )
    if token_mask is not None and token_mask.shape != ids.shape:
        raise DataError(
            f"token_mask has {len(token_mask)} entries, but there are {len(ids)} ids",
            code="batch_shape",
            keys=("token_mask",),
            fix="pass one entry per token",
        )
