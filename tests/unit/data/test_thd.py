"""Published layouts of THD rows, and what a rank of context parallelism gets of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from automodel_cli.config.errors import DataError
from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.data.thd import RAGGED, THDBatch, dual_chunk_order, pack_for_thd, squeeze_row
from tests.errors import raises

IDS = torch.tensor([11, 12, 13, 14, 15, 21, 22, 23, 31, 32, 33, 34, 35, 36, 41, 42])
LENGTHS = (5, 3, 6, 2)
RESPONSE = torch.cat([torch.arange(n) >= 2 for n in LENGTHS]).float()  # from position 2 of each sequence
X = IGNORE_INDEX


def packed(rows: tuple[int, ...] = (4,), **options: Any) -> THDBatch:
    return pack_for_thd(IDS, LENGTHS, rows, pad_id=0, min_seq_len=16, token_mask=RESPONSE, **options)


def test_one_row():
    batch = packed()
    assert batch.input_ids.tolist() == [IDS.tolist()]
    assert batch.labels.tolist() == [[X, X, 13, 14, 15, X, X, 23, X, X, 33, 34, 35, 36, X, X]]
    assert batch.cu_seqlens.tolist() == [0, 5, 8, 14, 16] and batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens_padded_per_row.tolist() == [[0, 5, 8, 14, 16]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4, 5, 0, 1]]


def test_two_rows_and_the_tail():
    batch = packed((2, 2))
    assert batch.input_ids[0].tolist() == [11, 12, 13, 14, 15, 21, 22, 23, *[0] * 8]
    assert batch.labels[0].tolist() == [X, X, 13, 14, 15, X, X, 23, *[X] * 8]
    assert batch.position_ids[1].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, *[0] * 8]
    assert batch.cu_seqlens_per_row.tolist() == [[0, 5, 8], [0, 6, 8]]
    assert batch.cu_seqlens_padded_per_row.tolist() == [[0, 5, 16], [0, 6, 16]]
    assert batch.max_seqlen.tolist() == [11, 10] and batch.n_packed_rows == 2


def test_sequences_are_padded_for_two_context_parallel_ranks():
    batch = packed(cp_size=2)
    assert batch.cu_seqlens.tolist() == [0, 5, 8, 14, 16]
    assert batch.cu_seqlens_padded_per_row.tolist() == [[0, 8, 12, 20, 24]]
    assert batch.input_ids[0, :12].tolist() == [11, 12, 13, 14, 15, 0, 0, 0, 21, 22, 23, 0]
    assert batch.position_ids[0, :8].tolist() == list(range(8))
    assert batch.cp_rank is None


def test_rows_of_unequal_counts_fill_their_tables():
    batch = packed((3, 1))
    assert batch.cu_seqlens_per_row.tolist() == [[0, 5, 8, 14], [0, 2, RAGGED, RAGGED]]


def test_without_a_mask_all_real_tokens_are_labels():
    batch = pack_for_thd(IDS, LENGTHS, (4,), pad_id=0, min_seq_len=18)
    assert batch.labels.tolist() == [[*IDS.tolist(), X, X]]


@pytest.mark.parametrize(
    ("length", "cp_size", "ranks"),
    [
        (16, 2, [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]),
        (8, 4, [[0, 7], [1, 6], [2, 5], [3, 4]]),
        (3, 1, [[0, 1, 2]]),
    ],
)
def test_dual_chunks(length: int, cp_size: int, ranks: list[list[int]]):
    assert dual_chunk_order(length, cp_size).tolist() == ranks


class _Mesh:
    """A mesh on one rank of its context-parallel axis."""

    def __init__(self, rank: int):
        self._rank = rank

    @property
    def cp(self) -> _Mesh:
        return self

    def get_local_rank(self) -> int:
        return self._rank


def test_ranks_take_their_chunks_of_every_sequence():
    whole = packed(cp_size=2)
    shares = [packed(cp_size=2, meshes=_Mesh(rank)) for rank in range(2)]
    assert shares[0].input_ids.tolist() == [[11, 12, 0, 0, 21, 0, 31, 32, 0, 0, 41, 0]]
    assert shares[1].input_ids.tolist() == [[13, 14, 15, 0, 22, 23, 33, 34, 35, 36, 42, 0]]
    assert [s.cp_rank for s in shares] == [0, 1]
    for name in ("input_ids", "position_ids", "labels"):
        both = torch.cat([getattr(s, name) for s in shares], 1)
        assert both.sort().values.equal(getattr(whole, name).sort().values)


def test_one_row_of_a_pipeline_reaches_the_model_without_its_leading_one():
    seen: list[dict[str, Any]] = []

    class Model(nn.Module):
        def forward(self, **kwargs: Any) -> None:
            seen.append(kwargs)

    model = Model()
    model.register_forward_pre_hook(squeeze_row, with_kwargs=True)
    batch = packed((3, 1), num_chunks=2)
    kwargs = batch.model_kwargs()
    for row in range(2):
        model(**{name: x[row : row + 1] if isinstance(x, torch.Tensor) else x for name, x in kwargs.items()})
    assert seen[1]["cu_seqlens"].tolist() == [0, 16] and seen[1]["cu_seqlens"].dtype == torch.int32
    assert seen[0]["input_ids"].shape == (16,) and int(seen[0]["max_seqlen"]) == 8
    assert set(seen[0]) == {"input_ids", "labels", "position_ids", "cu_seqlens", "qkv_format", "max_seqlen"}


@pytest.mark.parametrize(
    ("changes", "code", "key", "values"),
    [
        ({"lengths": (5, 3, 6)}, "batch_shape", "lengths", ([5, 3, 6], 16)),
        ({"sequences_per_row": (2, 1)}, "batch_shape", "sequences_per_row", ([2, 1], 4)),
        ({"sequences_per_row": (2, 2), "num_chunks": 3}, "not_divisible", "num_chunks", (2, 3)),
        ({"token_mask": torch.ones(3)}, "batch_shape", "token_mask", (3, 16)),
    ],
)
def test_numbers_that_do_not_add_up(changes: dict[str, Any], code: str, key: str, values: tuple[object, ...]):
    arguments = {"lengths": LENGTHS, "sequences_per_row": (4,)} | changes
    with raises(DataError, code, keys=(key,), values=values):
        pack_for_thd(IDS, pad_id=0, **arguments)


def test_a_sequence_that_ranks_cannot_share_is_refused():
    with raises(DataError, "not_divisible", values=(6, 4)):
        dual_chunk_order(6, 2)
