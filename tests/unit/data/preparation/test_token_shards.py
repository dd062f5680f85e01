"""Datasets tokenized in shards: the bytes of one that is written in one go, also after kills and by processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from automodel_cli.config.errors import DataError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.groups import GroupSpec
from automodel_cli.data.labels import LabelSpec
from automodel_cli.data.preparation import pipeline, token_shards
from automodel_cli.data.preparation.build_shards import build_shards
from automodel_cli.data.preparation.pipeline import prepare_data
from automodel_cli.data.sources import sources, spans
from automodel_cli.data.sources.spans import Span, num_lines, plan_shards, read_span
from automodel_cli.models.tokenizer import ByteTokenizer
from tests.errors import raises
from tests.unit.data.helpers import write_jsonl

SHARD_BYTES = 3000


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Three files of 1, 40 and 5 rows, two of them invalid."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    number = 0
    for name, count in (("a.jsonl", 1), ("b.jsonl", 40), ("c.jsonl", 5)):
        rows: list[dict[str, Any]] = []
        for _ in range(count):
            number += 1
            rows.append({"text": f"Row {number} Größe. " * (1 + number * 7 % 20)})
        if name != "a.jsonl":
            rows[-2] = {"text": 7}
        write_jsonl(folder / name, rows)
    return folder


def config(corpus: Path, cache: str, **more: Any) -> DataConfig:
    options = {"seq_len": 64, "num_workers": 0, "on_invalid_row": "drop", "max_invalid_fraction": 0.5, **more}
    return DataConfig(path=str(corpus), cache_dir=str(corpus.parent / cache), **options)


def prepared(data: DataConfig) -> Any:
    return prepare_data(data, ByteTokenizer().build(), seed=0, progress=lambda line: None)


def entries(data: DataConfig) -> dict[str, dict[str, bytes]]:
    """The files of every entry of the cache."""
    folders = [path for path in Path(str(data.cache_dir)).iterdir() if path.is_dir() and path.name != "hashes"]
    return {folder.name: {path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders}


def test_shards_give_the_bytes_of_one_pass(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, sharded = config(corpus, "whole"), config(corpus, "sharded")
    report = prepared(whole).report.lines()[:-1]
    monkeypatch.setattr(spans, "SHARD_BYTES", SHARD_BYTES)
    again = prepared(sharded).report.lines()[:-1]
    assert [line.replace("/sharded/", "/whole/") for line in again] == report
    assert entries(sharded) == entries(whole)
    assert not list(Path(str(sharded.cache_dir)).glob("*.shards"))


def test_parts_of_several_processes_are_joined(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(whole := config(corpus, "whole"))
    monkeypatch.setattr(spans, "SHARD_BYTES", SHARD_BYTES)
    data, tokenizer = config(corpus, "parts"), ByteTokenizer().build()
    left = [build_shards(data, tokenizer, index=index, count=3, progress=lambda line: None) for index in (2, 0, 1)]
    assert left[0] > left[1] > left[2] == 0
    monkeypatch.setattr(token_shards.TokenShards, "_write", None)  # nothing is left to tokenize
    prepared(data)
    assert entries(data) == entries(whole)


def test_a_killed_preparation_repeats_no_complete_shard(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(whole := config(corpus, "whole"))
    monkeypatch.setattr(spans, "SHARD_BYTES", SHARD_BYTES)
    data, written = config(corpus, "killed"), []
    write = token_shards.TokenShards._write

    def counted(self: Any, folder: Path, of_shard: Any) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(of_shard)
        write(self, folder, of_shard)

    monkeypatch.setattr(token_shards.TokenShards, "_write", counted)
    with pytest.raises(KeyboardInterrupt):
        prepared(data)
    first, written[:] = written[:], []
    written.append(None)  # one more, then killed again
    with pytest.raises(KeyboardInterrupt):
        prepared(data)
    first.append(written[1])
    monkeypatch.setattr(token_shards.TokenShards, "_write", write)
    prepared(data)
    assert len({str(of_shard) for of_shard in first}) == 3
    assert entries(data) == entries(whole)


@pytest.mark.slow
def test_worker_processes_build_the_same(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared(whole := config(corpus, "whole"))
    monkeypatch.setattr(spans, "SHARD_BYTES", SHARD_BYTES)
    prepared(data := config(corpus, "workers", num_workers=2))
    assert entries(data) == entries(whole)


def test_a_mapped_column_that_no_shard_has_is_an_error(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": f"{n} + 1?" * 20, "completion": str(n)} for n in range(50)]
    path = write_jsonl(corpus.parent / "rows.jsonl", rows)
    monkeypatch.setattr(spans, "SHARD_BYTES", SHARD_BYTES)
    data = DataConfig(
        path=str(path), column_mapping={"system": "sytem"}, cache_dir=str(corpus.parent / "c"), num_workers=0
    )
    with raises(DataError, "unknown_name", keys=("data.column_mapping",)):
        prepared(data)


@pytest.mark.parametrize("size", [1, 7, 50, 1000])
def test_spans_cover_every_line_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    lines = [json.dumps({"text": "ä" * (n % 9), "n": n}) for n in range(30)]
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.txt"]
    paths[0].write_text("\n".join(lines))  # no line break at the end
    paths[1].write_text("\n\n".join(lines) + "\n")
    paths[2].write_text("ä\nb\n\nc\n")
    monkeypatch.setattr(spans, "SHARD_BYTES", size)
    found: list[tuple[int, int, Any]] = []
    shifts = [0, 0, 0]
    for shard in plan_shards(paths, "line"):
        assert len({span.file for span in shard}) == len(shard)
        for span in shard:
            rows = read_span(paths[span.file], "line", span)
            found += [(span.file, number + shifts[span.file], row) for number, row in rows]
            shifts[span.file] += num_lines(paths[span.file], span)
    whole = [(n, line, row) for n, path in enumerate(paths) for line, row in read_span(path, "line", Span(n))]
    assert found == whole and len(whole) == 63


PAIRS = [{"prompt": f"{n}?" * 9, "chosen": f"{n}", "rejected": f"no {n}", "margin": n} for n in range(99)]
LABELED = [{"text": f"{n} words " * (1 + n % 9), "label": ["a", "b"][n % 2]} for n in range(99)]
TAGGED = [{"tokens": ["one", str(n)], "tags": ["O", "B"]} for n in range(99)]
GROUPS = [{"query": f"{n}?", "positive": f"yes {n}" * 5, "negatives": ["no", f"{n} no"][: n % 3]} for n in range(99)]


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (PAIRS, {"preferences": True}),
        (LABELED, {"row_spec": LabelSpec("single_label_classification", ("a", "b"))}),
        (TAGGED, {"row_spec": LabelSpec("single_label_classification", ("O", "B"), of_tokens=True)}),
        (GROUPS, {"row_spec": GroupSpec()}),
    ],
    ids=["pairs", "labeled", "tagged", "groups"],
)
def test_rows_of_every_kind_are_joined(
    rows: list[Any], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [*rows, {"nothing": 1}])
    limits: dict[str, Any] = {"seq_len": 256, "num_workers": 0, "on_invalid_row": "drop", "max_invalid_fraction": 0.1}
    whole = DataConfig(path=str(path), cache_dir=str(tmp_path / "whole"), **limits)
    parts = DataConfig(path=str(path), cache_dir=str(tmp_path / "parts"), **limits)
    tokenizer = ByteTokenizer().build()
    prepare_data(whole, tokenizer, seed=0, **options)
    monkeypatch.setattr(spans, "SHARD_BYTES", 1000)
    left = [build_shards(parts, tokenizer, index=n, count=2, progress=lambda line: None, **options) for n in (1, 0)]
    assert left[0] > left[1] == 0
    monkeypatch.setattr(token_shards.TokenShards, "_write", None)  # nothing is left to tokenize
    prepare_data(parts, tokenizer, seed=0, progress=lambda line: None, **options)
    assert entries(parts) == entries(whole)


def test_hub_datasets_are_divided_by_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"Row {n}. " * (1 + n % 20)} for n in range(80)]
    monkeypatch.setattr(sources, "load_hub", lambda config: Dataset.from_list(rows))
    made = {}
    for name, size in (("whole", 1 << 20), ("parts", 1000)):
        monkeypatch.setattr(spans, "SHARD_BYTES", size)
        data = DataConfig(path="owner/name", seq_len=64, num_workers=0, cache_dir=str(tmp_path / name))
        assert (len(sources.open_source(data.train_sources()[0], tmp_path).shards()) > 5) == (name == "parts")  # type: ignore[attr-defined]
        prepare_data(data, ByteTokenizer().build(), seed=0, progress=lambda line: None)
        made[name] = entries(data)
    assert made["parts"] == made["whole"]
    assert not list((tmp_path / "parts").glob("*.shards"))


def test_rated_responses_are_not_sharded(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KTO pairs a response with the next one of its batch, so shards would change its data."""
    rows = [{"prompt": f"{n}?" * 9, "completion": str(n), "label": n % 2 == 0} for n in range(99)]
    path = write_jsonl(corpus.parent / "judged.jsonl", rows)
    monkeypatch.setattr(spans, "SHARD_BYTES", SHARD_BYTES)
    monkeypatch.setattr(pipeline, "TokenShards", None)
    data = DataConfig(path=str(path), cache_dir=str(corpus.parent / "c"), num_workers=0)
    assert prepare_data(data, ByteTokenizer().build(), seed=0, preferences=True).train.kind == "judged"


def test_joined_columns_are_those_of_the_rows(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "SHARD_BYTES", SHARD_BYTES)
    data = prepared(config(corpus, "sharded"))
    lines = {line for row in range(len(data.train)) for line in data.train.documents(row)}
    expected = {("a.jsonl", 1), *(("b.jsonl", n) for n in range(1, 41) if n != 39)}
    assert lines == expected | {("c.jsonl", n) for n in (1, 2, 3, 5)}
    assert np.isin(data.train.row_lengths, range(1, 65)).all()
