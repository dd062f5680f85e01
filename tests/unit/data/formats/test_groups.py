"""Queries with passages: the tokens of prompt and text, roles, and what is refused."""

from __future__ import annotations

import itertools

import pytest

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.formats.groups import Retrieval
from automodel_cli.data.groups import GroupSpec
from automodel_cli.data.preparation.packed_rows import DUMMY_ROW
from automodel_cli.data.preparation.pipeline import prepare_data
from tests.errors import raises
from tests.unit.data.helpers import tiny_tokenizer, write_jsonl

ROWS = [
    {"query": "what is it", "positive": "the answer is seven", "negatives": ["no", "hello"]},
    {"query": "hello", "positive": "hi", "negative": "no"},
    {"query": "no", "positive": "hi"},
]


PLAIN = GroupSpec()


def prepared(tmp_path, rows, spec=PLAIN, **options):
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    options = {"seq_len": 96, "truncation": "drop", "cache_dir": str(tmp_path / "cache"), **options}
    return prepare_data(DataConfig(path=str(path), **options), tiny_tokenizer(), seed=0, row_spec=spec).train


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_a_group_stays_together_with_its_roles(tmp_path, packing):
    train, tokenizer = prepared(tmp_path, ROWS, GroupSpec("q: ", "p: "), packing=packing), tiny_tokenizer()
    wanted = {
        ("q: what is it", "p: the answer is seven", "p: no", "p: hello"),
        ("q: hello", "p: hi", "p: no"),
        ("q: no", "p: hi"),
    }
    found = set()
    for row in range(len(train)):
        ids, _, bounds = train.tokens(row)
        texts = [tokenizer.decode(ids[a:b].tolist()) for a, b in itertools.pairwise(bounds.tolist())]
        roles = train.collate([row]).extra["roles_S"].tolist()[: len(texts)]
        starts = [i for i, role in enumerate(roles) if role == 0]
        for a, b in itertools.pairwise([*starts, len(texts)]):
            assert roles[a:b] == [0, 1, *[2] * (b - a - 2)]
            found.add(tuple(texts[a:b]))
    assert found == wanted
    assert set(train.collate([DUMMY_ROW]).extra["roles_S"].tolist()) == {-1}


def test_scores_belong_to_all_documents_of_a_pair(tmp_path):
    rows = [{"query": "no", "positive": "hi", "score": 0.25}]
    batch = prepared(tmp_path, rows, GroupSpec(scored=True)).collate([0])
    assert batch.extra["scores_S"].tolist()[:2] == [0.25, 0.25]


def test_each_text_is_cut_to_max_tokens(tmp_path):
    train = prepared(tmp_path, ROWS, GroupSpec(max_tokens=3))
    _, _, bounds = train.tokens(0)
    assert max(b - a for a, b in itertools.pairwise(bounds.tolist())) == 3


@pytest.mark.parametrize(
    ("row", "spec"),
    [
        ({"query": "no", "positive": "hi", "score": 1.0}, GroupSpec()),
        ({"query": "no", "positive": "hi"}, GroupSpec(scored=True)),
        ({"query": "no", "positive": "hi", "score": "1"}, GroupSpec(scored=True)),
        ({"query": "no", "positive": "hi", "negatives": [3]}, GroupSpec()),
    ],
)
def test_rows_that_do_not_fit_the_objective_are_refused(tmp_path, row, spec):
    with raises(DataError, "bad_rows", values=("rows.jsonl:1",)):
        prepared(tmp_path, [row], spec)


def test_columns_and_formats_are_checked(tmp_path):
    fix = "data.column_mapping='{query: anchor, positive: passage}'"
    with raises(DataError, "unknown_format", fix=fix):
        prepared(tmp_path, [{"anchor": "no", "passage": "hi"}])
    with raises(ConfigError, "wrong_data_kind", keys=("data.format",)):
        prepared(tmp_path, ROWS, format="messages")
    assert Retrieval().makes == "groups"
