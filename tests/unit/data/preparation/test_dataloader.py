"""Batches, their order over ranks and epochs, and resuming, on rows small enough to check by hand."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.data.mixture import Mixture
from automodel_cli.data.preparation.dataloader import BatchLoader, eval_batches
from automodel_cli.data.preparation.dataset import PackedDataset
from automodel_cli.data.preparation.row_stream import shuffled
from automodel_cli.data.storage.memmap_store import PackedStore
from automodel_cli.training.train_config import BatchSizeRamp, TrainConfig
from tests.errors import raises

PAD = 99


def store(rows: list[list[list[int]]], name: str = "t.jsonl", content: str = "a") -> PackedStore:
    """Rows of documents of tokens; every even token is trained."""
    pieces = [document for row in rows for document in row]
    masks = [[int(t % 2 == 0) for t in document[1:]] + [0] for document in pieces]
    per_row = iter(map(sum, masks))
    return PackedStore(
        meta={"files": [name], "content": content},
        ids=np.concatenate(pieces).astype(np.uint16),
        label_mask=np.concatenate(masks).astype(np.uint8),
        offsets=np.cumsum([0, *map(len, pieces)]),
        row_offsets=np.cumsum([0, *map(len, rows)]),
        files=np.zeros(len(pieces), np.int32),
        lines=np.arange(1, len(pieces) + 1),
        num_label_tokens=np.array([sum(next(per_row) for _ in row) for row in rows]),
    )


def numbered(number: int, name: str = "t.jsonl") -> PackedStore:
    return store([[[2, 2]] for _ in range(number)], name)


def dataset(*stores: PackedStore, epochs: tuple[float, ...] | None = None, row_len: int | None = None) -> PackedDataset:
    return PackedDataset(stores, mixture(len(stores), epochs), pad_id=PAD, row_len=row_len)


def mixture(number: int, epochs: tuple[float, ...] | None = None) -> Mixture:
    return Mixture(tuple(f"d{i}" for i in range(number)), epochs or (1.0,) * number, (1.0,) * number)


def seen(loader: BatchLoader, steps: int) -> list[list[int]]:
    """Row numbers of each step, over this rank's microbatches."""
    return [[row for batch in loader.next_step() for row in batch.row_ids_B.tolist()] for _ in range(steps)]


def flat(lists) -> list[int]:
    return list(itertools.chain.from_iterable(lists))


# -- batches


def test_a_batch_by_hand():
    data = dataset(store([[[1, 2, 3], [4, 6]], [[8, 10]]]))
    batch = data.collate([0, 1])
    ignored = IGNORE_INDEX
    assert batch.input_ids_BT.tolist() == [[1, 2, 3, 4, 6], [8, 10, PAD, PAD, PAD]]
    assert batch.labels_BT.tolist() == [[2, ignored, ignored, 6, ignored], [10, ignored, ignored, ignored, ignored]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 7, 10] and batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == 3 and batch.row_ids_B.tolist() == [0, 1]
    assert [data.num_label_tokens(r) for r in (0, 1)] == [2, 1] == (batch.labels_BT != ignored).sum(1).tolist()
    assert data.describe(0) == "t.jsonl:1, 2" and data.describe(1) == "t.jsonl:3"


def test_every_document_of_a_row_is_apart():
    """Three and four documents in rows with and without padding: boundaries and positions by hand."""
    batch = dataset(store([[[2, 2], [2], [2, 2, 2]], [[2], [2], [2], [2]]]), row_len=6).collate([0, 1])
    assert batch.cu_seqlens.tolist() == [0, 2, 3, 6, 7, 8, 9, 10, 12]
    assert batch.position_ids_BT.tolist() == [[0, 1, 0, 0, 1, 2], [0, 0, 0, 0, 0, 1]]


def test_lengths_of_padded_rows():
    rows = [[[1, 2, 3]], [[4, 6]]]
    assert dataset(store(rows)).collate([1]).shape == (1, 2)
    assert dataset(store(rows), row_len=8).collate([1]).shape == (1, 8)
    assert PackedDataset([store(rows)], mixture(1), pad_id=PAD, row_len=None, pad_to_multiple_of=4).collate(
        [0, 1]
    ).shape == (2, 4)


def test_a_full_row_has_no_padding_document():
    batch = dataset(store([[[1, 2], [3, 4]]]), row_len=4).collate([0])
    assert batch.cu_seqlens.tolist() == [0, 2, 4]


def test_two_datasets_are_numbered_through():
    data = dataset(numbered(2, "a"), numbered(3, "b"))
    assert len(data) == 5 and [data.describe(r) for r in (1, 2, 4)] == ["a:2", "b:1", "b:3"]
    with pytest.raises(IndexError):
        data.describe(5)


# -- order


def loader(
    data: PackedDataset, rank: int = 0, size: int = 1, microbatch: int = 1, batch: int = 12, **options
) -> BatchLoader:
    return BatchLoader(
        data, global_batch_size=batch, microbatch_size=microbatch, dp_rank=rank, dp_size=size, seed=3, **options
    )


@pytest.mark.parametrize(("size", "microbatch"), [(1, 3), (2, 1), (2, 3), (3, 2), (4, 3), (12, 1)])
def test_ranks_share_each_step_and_the_steps_do_not_depend_on_them(size, microbatch):
    data = dataset(numbered(30), numbered(7))
    reference = seen(loader(data), 6)
    ranks = [seen(loader(data, rank, size, microbatch), 6) for rank in range(size)]
    for step, expected in enumerate(reference):
        assert sorted(flat(rank[step] for rank in ranks)) == sorted(expected)
        assert {len(rank[step]) for rank in ranks} == {12 // size}


def test_an_epoch_sees_every_row_once_and_the_next_in_another_order():
    data = dataset(numbered(24))
    first, second = (flat(part) for part in np.array(seen(loader(data), 4)).reshape(2, 2, 12).tolist())
    assert sorted(first) == sorted(second) == list(range(24)) and first != second
    assert flat(seen(loader(data, shuffle=False), 2)) == list(range(24))


def test_a_step_may_reach_over_epochs_and_hold_more_than_one():
    rows = flat(seen(loader(dataset(numbered(5))), 5))
    assert np.bincount(rows).tolist() == [12] * 5  # 60 rows of the stream are 12 epochs


def test_epochs_are_how_often_a_row_is_seen_per_epoch():
    data = dataset(numbered(10), numbered(8), epochs=(2.0, 0.5))
    stepper = loader(data, batch=24)
    assert stepper.stream.rows_per_epoch == 24 and stepper.steps_per_epoch == 1
    one = np.bincount(seen(stepper, 1)[0], minlength=18)
    assert one[:10].tolist() == [2] * 10 and one[10:].sum() == 4 and one[10:].max() == 1
    two = one + np.bincount(seen(stepper, 1)[0], minlength=18)
    assert two[10:].tolist() == [1] * 8  # the other half in the second epoch
    third = np.bincount(seen(stepper, 1)[0], minlength=18)
    assert third[10:].tolist() != one[10:].tolist()  # and other halves in the next two


def test_documents_of_a_row_are_the_mean_over_the_rows_that_an_epoch_has():
    packed = store([[[2, 2], [4, 4, 4]], [[2, 2]], [[2], [2], [2, 6]]])
    data = dataset(packed, numbered(8), epochs=(2.0, 0.5))
    rows = flat(seen(loader(data, batch=10), 2))  # two epochs of 3 x 2 + 8 / 2 rows
    counted = [len(data.documents(row)) for row in rows]
    assert data.units_per_row() == ("documents", pytest.approx(sum(counted) / len(counted)))
    assert data.units_per_row()[1] == pytest.approx((2 * 6 + 0.5 * 8) / 10)


@pytest.mark.parametrize(("size", "microbatch"), [(1, 1), (1, 4), (3, 2), (4, 1)])
def test_resuming_sees_the_next_rows_also_on_another_number_of_ranks(size, microbatch):
    data = dataset(numbered(31), numbered(9), epochs=(1.0, 1.5))
    straight = loader(data, 0, 2, 3)
    seen(straight, 3)
    state = straight.state_dict()
    expected = [sorted(a + b) for a, b in zip(seen(straight, 4), resumed(data, state, 1, 2, 3, 4), strict=True)]
    parts = [resumed(data, state, rank, size, microbatch, 4) for rank in range(size)]
    assert [sorted(flat(step)) for step in zip(*parts, strict=True)] == expected


def resumed(data, state, rank, size, microbatch, steps):
    other = loader(data, rank, size, microbatch)
    other.load_state_dict(state)
    return seen(other, steps)


def test_working_ahead_changes_neither_the_rows_nor_what_is_resumed():
    """The state is that of the steps that were taken, not of the one that a thread has begun."""
    data, prepared = dataset(numbered(10)), []

    def ahead() -> BatchLoader:
        def prepare(batch):
            prepared.append((threading.current_thread() is threading.main_thread(), batch.row_ids_B.tolist()))
            return batch

        return BatchLoader(data, global_batch_size=4, microbatch_size=2, prepare=prepare)

    plain = BatchLoader(data, global_batch_size=4, microbatch_size=2)
    want = seen(plain, 6)
    first = ahead()
    assert seen(first, 3) == want[:3]
    state = first.state_dict()
    assert state["position"] == 12
    assert [row for batch in first.peek_step() for row in batch.row_ids_B.tolist()] == want[3]
    second = ahead()
    assert seen(second, 1) == want[:1]  # a step that it has begun is not the one that follows the state
    second.load_state_dict(state)
    assert seen(second, 3) == want[3:] == seen(first, 3)
    begun = [is_main for is_main, _ in prepared]
    assert begun.count(True) <= 6 and begun.count(False) >= 14  # only the first step, and the first after a load


def test_a_position_in_other_data_is_refused():
    state = loader(dataset(numbered(30))).state_dict()
    with raises(RunError, "checkpoint_mismatch", keys=("data",), values=("sizes", "[30]", "[29]")):
        loader(dataset(numbered(29))).load_state_dict(state)


def test_edited_rows_are_refused_by_name_where_their_number_is_the_same():
    rows = [[[2, 2]] for _ in range(30)]
    state = loader(dataset(numbered(9, "same.jsonl"), store(rows, "edited.jsonl", "before"))).state_dict()
    now = loader(dataset(numbered(9, "same.jsonl"), store(rows, "edited.jsonl", "after")))
    with raises(RunError, "checkpoint_mismatch", keys=("data",), values=("edited.jsonl",)) as caught:
        now.load_state_dict(state)
    assert "automodel export RUN" in caught.value.fix


def test_uneven_global_batch_is_refused_with_the_nearest_that_fits():
    values = ("global_batch_size=20", "microbatch_size=2", "4 data-parallel ranks")
    with raises(
        ConfigError, "not_divisible", keys=("global_batch_size",), values=values, fix="train.global_batch_size=16"
    ):
        loader(dataset(numbered(5)), 0, 4, 2, batch=20)


def test_orders_do_not_change_between_versions():
    assert shuffled(8, 1, 2).tolist() == [7, 1, 3, 0, 4, 2, 6, 5]


@pytest.mark.parametrize(("size", "microbatch"), [(1, 2), (2, 2), (3, 1), (4, 4)])
def test_validation_sees_every_row_once_and_ranks_run_equally_many_batches(size, microbatch):
    data = dataset(numbered(7))
    ranks = [eval_batches(data, microbatch_size=microbatch, dp_rank=r, dp_size=size) for r in range(size)]
    assert len({len(batches) for batches in ranks}) == 1
    rows = [row for batches in ranks for batch in batches for row in batch.row_ids_B.tolist()]
    assert sorted(row for row in rows if row >= 0) == list(range(7))
    labels = sum(int(batch.num_label_tokens) for batches in ranks for batch in batches)
    assert labels == 7
    assert all(batch.shape[0] == microbatch for batches in ranks for batch in batches)
    assert data.describe(-1) == "(padding)"


def test_a_ramp_uses_the_same_sequences_on_any_number_of_ranks() -> None:
    ramp = TrainConfig(8, 1, max_steps=1, batch_size_ramp=BatchSizeRamp(start=2, increment=2, rows=18))
    sizes = [2, 2, 2, 4, 4, 6, 8, 8]  # Megatron-LM: 6 sequences with each of the three smaller sizes
    options = {"global_batch_size": 8, "microbatch_size": 1, "seed": 3, "batch_size": ramp.batch_size}
    rows = dataset(numbered(50))
    one = BatchLoader(rows, **options)
    two = [BatchLoader(rows, dp_rank=rank, dp_size=2, **options) for rank in range(2)]
    assert one.steps_per_epoch == 10 and [one.position_after(n) for n in (0, 1, 4, 8)] == [0, 2, 10, 36]
    ahead = [one.next_rows(n).ravel().tolist() for n in range(8)]
    assert list(map(len, ahead)) == sizes
    assert flat(ahead) == seen(BatchLoader(rows, global_batch_size=36, microbatch_size=1, seed=3), 1)[0]
    assert seen(one, 4) == ahead[:4]
    resumed = BatchLoader(rows, **options)
    resumed.load_state_dict(one.state_dict())
    assert seen(resumed, 4) == ahead[4:]
    for a, b, step in zip(seen(two[0], 8), seen(two[1], 8), ahead, strict=True):
        assert flat(zip(a, b, strict=True)) == step


def test_new_data_are_read_from_their_start_on_request() -> None:
    options = {"global_batch_size": 4, "microbatch_size": 1, "seed": 1}
    old, new = (BatchLoader(dataset(numbered(size)), **options) for size in (20, 30))
    old.next_step()
    with raises(RunError, "checkpoint_mismatch", keys=("data",)):
        new.load_state_dict(old.state_dict())
    assert new.load_state_dict(old.state_dict(), accept_new_data=True) and new.position == 0
    new.next_step()
    again = BatchLoader(dataset(numbered(30)), **options)
    assert not again.load_state_dict(new.state_dict(), accept_new_data=True) and again.position == 4
