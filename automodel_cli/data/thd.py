"""Layout of sequences for variable-length attention kernels (THD: tokens, heads, dim).

For trainers that hold lists of tokens, as in reinforcement learning. The packed `Batch` does not need this module: its
`cu_seqlens` are already the boundaries for such a kernel, and the model part splits sequences itself.

1. With context parallelism, each sequence is padded to a multiple of `2 * cp_size`, so that each rank can hold two
   mirrored chunks of it.
2. All rows have the length of the longest row, at least `min_seq_len`. In the padded lengths, the last sequence of a
   row includes the tail.
3. Labels are the unshifted ids. Padding, and tokens with `token_mask` below 0.5, have the label `IGNORE_INDEX`.
4. `cu_seqlens` counts real tokens, for slicing per-token data of the trainer. `cu_seqlens_padded_per_row` counts padded
   tokens, for slicing model outputs (divided by `cp_size` on each rank).
5. Position ids restart at 0 in each sequence and continue through its padding. The tail has position 0.

Example: sequences of 3 and 5 tokens in one row with `cp_size` 2. They are padded to 4 and 8 tokens, the row has 12::

    cu_seqlens                 0 3 8
    cu_seqlens_padded_per_row  0 4 12
    position_ids               0 1 2 3  0 1 2 3 4 5 6 7
    tokens of rank 0           0 3      4 5 10 11          (chunks 0 and 3 of each sequence)
    tokens of rank 1           1 2      6 7 8 9            (chunks 1 and 2)
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
"""Fills unused entries of the boundary tables, in rows with fewer sequences than others."""


class TokenAxis(Protocol):
    def get_local_rank(self) -> int: ...


class Meshes(Protocol):
    """The part of a run's mesh that this module uses."""

    @property
    def cp(self) -> TokenAxis: ...


@dataclass(frozen=True)
class THDBatch:
    """Rows of packed sequences, complete or the part of one context-parallel rank.

    Attributes:
        input_ids, position_ids, labels: int64 `[rows, tokens]`.
        cu_seqlens: boundaries of real tokens over all rows, int32 `[sequences + 1]`.
        cu_seqlens_per_row, cu_seqlens_padded_per_row: boundaries within each row, int32 `[rows, most sequences + 1]`,
            filled with `RAGGED`. They refer to complete rows, also in the part of one rank.
        max_seqlen: longest padded sequence of each row, int32 `[rows]`.
        cp_rank: rank of the part. None: complete rows.
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
        """Return the keywords of a model with a THD kernel, one row per entry of dim 0. `cu_seqlens` are the padded
        boundaries. A pipeline splits them by rows, and `squeeze_row` converts one row to the kernel's form."""
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
    """Drop the leading dim of a chunk with one row, and the fill values of its boundaries.

    Use: `module.register_forward_pre_hook(squeeze_row, with_kwargs=True)`.
    """
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
    """Arrange the sequences in `ids` `[sum(lengths)]` in rows of `sequences_per_row` each.

    Args:
        num_chunks: chunks of a pipeline step. Must divide the number of rows.
        meshes: if given, return this rank's context-parallel part (see `share`), otherwise complete rows.
        token_mask: `[sum(lengths)]`. Tokens with 0.5 and above have loss.

    Raises:
        DataError: the numbers are inconsistent.
    """
    _check(ids, lengths, sequences_per_row, num_chunks, token_mask)
    # Example: lengths [2, 1, 3] with sequences_per_row [2, 1] and cp_size 1 give the rows t0 t1 t2 and t3 t4 t5,
    # cu_seqlens 0 2 3 6, and per row 0 2 3 and 0 3 -1000. The second row has one sequence less, so its table is filled
    # with `RAGGED`.
    multiple = 2 * cp_size if cp_size > 1 else 1
    first_of_row = [0, *accumulate(sequences_per_row)]
    labels = ids if token_mask is None else ids.masked_fill(token_mask < 0.5, IGNORE_INDEX)
    pieces_of_ids, pieces_of_labels = ids.split(list(lengths)), labels.split(list(lengths))
    padded = [_up(length, multiple) for length in lengths]
    rows = [padded[a:b] for a, b in pairwise(first_of_row)]
    num_tokens = _up(max(min_seq_len, *(sum(row) for row in rows)), multiple)
    # The tail belongs to the last sequence of a row. A kernel then sees boundaries that cover every position.
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
    """Return the tokens of one context-parallel rank: two mirrored chunks of every sequence. This gives each rank the
    same amount of causal attention."""
    indices = []
    for bounds in batch.cu_seqlens_padded_per_row.tolist():
        sequences = pairwise(bound for bound in bounds if bound != RAGGED)
        # Chunks are taken per sequence, not per row. A row-wise split would give one rank whole short sequences.
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
    """Return the token indices of one sequence by rank, int64 `[cp_size, length / cp_size]`. Raises DataError if
    `2 * cp_size` does not divide the length."""
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
    """Return the boundaries of every row, filled to the longest."""
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
