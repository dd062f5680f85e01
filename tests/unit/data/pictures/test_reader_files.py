"""Files of rows with pictures to batches: parquet and arrow with Image features, and a set with damaged files."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from automodel_cli.config.errors import DataError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.pictures.reader import PictureSupport
from automodel_cli.data.pictures.rows import PictureRows
from automodel_cli.data.preparation.dataloader import BatchLoader
from automodel_cli.data.preparation.pipeline import prepare_data
from automodel_cli.models.vision.processor import FamilyProcessor
from tests.errors import raises
from tests.vision import config_of, encoded, noise, processor_of


def prepared(folder: Path, path: Path, **options: Any) -> tuple[Any, PictureSupport]:
    library = processor_of("qwen3_vl")
    support = PictureSupport(PictureRows(str(folder), 10**6), FamilyProcessor(library, config_of("qwen3_vl")))
    config = DataConfig(path=str(path), seq_len=64, cache_dir=str(folder / "cache"), shuffle=False, **options)
    return prepare_data(config, library.tokenizer, seed=0, stop_ids=(1,), pictures=support), support


def chat(count: int) -> list[dict[str, str]]:
    question = "<image>" * count + "what is here"
    return [{"role": "user", "content": question}, {"role": "assistant", "content": "a picture"}]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_image_features_of_tables_reach_the_model(kind: str, tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    images = [[noise(16, 24, 1)], [noise(24, 16, 2), noise(16, 16, 3)], []]
    rows = {"messages": [chat(len(of_row)) for of_row in images], "images": images}
    text = datasets.Value("string")
    message = {"role": text, "content": text}
    features = datasets.Features({"messages": datasets.List(message), "images": datasets.List(datasets.Image())})
    table = datasets.Dataset.from_dict(rows, features=features)
    path = tmp_path / ("rows.parquet" if kind == "parquet" else "rows")
    table.to_parquet(path) if kind == "parquet" else table.save_to_disk(path)
    data, support = prepared(tmp_path, path, packing="none")
    order = [int(row) for row in range(3)]
    batch = data.train.collate(order)
    want = support.processor.inputs([image for of_row in images for image in of_row])
    got = dict(batch.pictures.inputs.items())
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_damaged_files_are_refused_by_name_or_left_out_until_they_are_repaired(tmp_path: Path):
    number, rng = 300, random.Random(0)
    contents = [encoded(noise(16, 16, seed), "JPEG") for seed in range(5)]
    png = encoded(noise(40, 40, 9))
    damages = [contents[0][:200], png[: len(png) // 2], b"", b"text", None]
    bad = dict(zip(rng.sample(range(number), len(damages)), damages, strict=True))
    with (tmp_path / "rows.jsonl").open("w") as rows:
        for index in range(number):
            content = bad.get(index, contents[index % 5])
            if content is not None:
                (tmp_path / f"{index}.jpg").write_bytes(content)
            rows.write(
                json.dumps({"messages": chat(2), "images": ["0.jpg" if 0 not in bad else "1.jpg", f"{index}.jpg"]})
                + "\n"
            )
    with raises(DataError, "bad_rows") as caught:
        prepared(tmp_path, tmp_path / "rows.jsonl")
    assert f"{len(bad)} of {number} rows" in str(caught.value)
    with raises(DataError, "bad_rows"):
        prepared(tmp_path, tmp_path / "rows.jsonl", on_invalid_row="drop")
    data, _ = prepared(tmp_path, tmp_path / "rows.jsonl", on_invalid_row="drop", max_invalid_fraction=0.02)
    (report,) = data.report.train
    assert report.num_rejected == len(bad) and report.num_documents == number - len(bad)
    rejected = [json.loads(line) for line in Path(report.rejected_path).read_text().splitlines()]
    assert {item["line"] - 1 for item in rejected} == set(bad)
    assert Counter(item["code"] for item in rejected) == report.rejected_codes
    assert report.rejected_codes == {"bad_picture": 2, "no_picture_format": 2, "no_picture": 1}
    for item in rejected:
        assert "images[1]" in item["message"] and f"{item['line'] - 1}.jpg" in item["message"]

    for index in bad:  # the rows are those of before, only the pictures are repaired
        (tmp_path / f"{index}.jpg").write_bytes(contents[0])
    data, _ = prepared(tmp_path, tmp_path / "rows.jsonl")
    assert data.report.train[0].num_documents == number


def test_rows_of_a_step_are_dealt_by_tokens_and_the_work_of_pictures(tmp_path: Path):
    rng = random.Random(0)
    with (tmp_path / "rows.jsonl").open("w") as rows:
        for index in range(64):
            names = [f"{index}_{nth}.png" for nth in range(rng.choice((0, 0, 1, 4)))]
            for name in names:
                (tmp_path / name).write_bytes(encoded(noise(rng.choice((8, 16, 32)), 16, index)))
            rows.write(json.dumps({"messages": chat(len(names)), "images": names}) + "\n")
    data, support = prepared(tmp_path, tmp_path / "rows.jsonl", packing="none")
    assert data.train.row_costs() is None, "without the cost of an image token, rows stay in their order"
    data.train.pictures.image_token_cost = 2.5
    costs = data.train.row_costs()
    for row in range(len(data.train)):
        ids, _, _ = data.train.tokens(row)
        assert costs[row] == len(ids) + 2.5 * (ids == support.processor.placeholder).sum()

    def heaviest(row_costs: Any) -> tuple[list[list[int]], list[float]]:
        loaders = [
            BatchLoader(
                data.train, global_batch_size=16, microbatch_size=2, dp_rank=rank, dp_size=4, row_costs=row_costs
            )
            for rank in range(4)
        ]
        steps = [[loader.next_rows(step) for loader in loaders] for step in range(4)]
        loads = [max(float(costs[of_rank].sum(1).max()) for of_rank in ranks) for ranks in steps]
        return [sorted(row for of_rank in ranks for row in of_rank.flatten().tolist()) for ranks in steps], loads

    (as_drawn, before), (as_dealt, after) = heaviest(None), heaviest(costs)
    assert as_drawn == as_dealt, "each step trains on the same rows"
    assert sum(after) < 0.8 * sum(before)
