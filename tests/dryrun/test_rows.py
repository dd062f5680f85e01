"""Rows of a dry run that are not packed, against those that the loader would give a step."""

from __future__ import annotations

from typing import Any

import pytest

from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.dryrun.synthetic_batches import document_lengths, microbatches
from automodel_cli.dryrun.types import TraceRequest
from automodel_cli.dryrun.worker import load
from automodel_cli.models.tokenizer import load_tokenizer

_UNPACKED = ("data.packing=none", "train.microbatch_size=4")


def _recipe(conf: str, *overrides: str) -> Any:
    return load(TraceRequest(conf, (*_UNPACKED, *overrides), 1))


@pytest.mark.parametrize(
    ("conf", "overrides"),
    [
        ("quickstart", ()),
        ("quickstart", ("data.padding=seq_len",)),
        ("quickstart", ("data.pad_to_multiple_of=64",)),
        ("quickstart_dpo", ()),
    ],
)
def test_unpacked_rows_are_padded_and_cut_as_the_loader_collates_them(conf: str, overrides: tuple[str, ...]) -> None:
    # a dry run reads the first 64
    few = "data.generator.num_train=100" if conf == "quickstart" else "data.generator.tasks.num_train=100"
    recipe = _recipe(conf, few, *overrides)
    loaded = recipe.prepared(load_tokenizer(recipe.model)).train
    documents = document_lengths(recipe, None)
    assert not documents.alike
    for index, ours in enumerate(microbatches(recipe, documents, 2)):
        batch = loaded.collate(range(4 * index, 4 * index + 4))
        assert ours.input_ids.shape == batch.input_ids_BT.shape
        assert ours.cu_seqlens.tolist() == batch.cu_seqlens.tolist()
        assert (ours.positions == batch.position_ids_BT).all()
        assert (ours.labels[batch.labels_BT != IGNORE_INDEX] != IGNORE_INDEX).all()
        real = sum(len(loaded.tokens(row)[0]) for row in range(4 * index, 4 * index + 4))
        assert (sum(ours.lengths), int((ours.labels != IGNORE_INDEX).sum())) == (real, real - len(ours.lengths))
        if conf == "quickstart_dpo":
            assert ours.integers["pairs_P2"].tolist() == batch.extra["pairs_P2"].tolist()


def test_without_data_an_unpacked_row_is_as_long_as_it_can_be_or_as_asked() -> None:
    recipe = load(TraceRequest("qwen3_0_6b", _UNPACKED, 1))
    whole = recipe.data.seq_len
    assert document_lengths(recipe, None).rows == (((whole, ()),),)
    assert document_lengths(recipe, 100).rows == (((100, ()),),)
    assert microbatches(recipe, document_lengths(recipe, 100), 1)[0].input_ids.shape == (4, 100)
    pairs = load(TraceRequest("dpo_llama3_8b_pp2", _UNPACKED, 8))
    assert document_lengths(pairs, 100_000).rows == (((pairs.data.seq_len // 2, ()),) * 2,)
