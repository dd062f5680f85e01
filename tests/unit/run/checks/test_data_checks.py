"""What `check` and `submit` know of a run from its data files: columns that no format reads, schedules that do not fit.

The bound on steps is compared with the steps that a real preparation of the same rows gives.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from automodel_cli.config.check import check_config
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.errors import ConfigError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.preparation.dataloader import BatchLoader
from automodel_cli.data.preparation.pipeline import prepare_data
from automodel_cli.data.preparation.preview import most_rows
from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.run.checks.data_checks import warn_of_repeated_rows

TURN = {"role": "user", "content": "say some words please"}
CHATS = [{"messages": [TURN, {"role": "assistant", "content": "well " * i}] * (1 + i % 3)} for i in range(1, 14)]
RECIPE = """
defaults: [sft, _self_]
model: {config: {model_type: llama}, tokenizer: {_target_: automodel_cli.models.tokenizer.ByteTokenizer}}
optimizer: {lr: 1e-3}
train: {global_batch_size: 4}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "train.jsonl", CHATS)
    (tmp_path / "mine.yaml").write_text(RECIPE)
    return tmp_path


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def problems(*overrides: str) -> list[ConfigError]:
    return list(check_config(compose("mine.yaml", overrides)).data_problems())


@pytest.mark.parametrize("packing", ["none", "best_fit", "wrapped"])
@pytest.mark.parametrize("rows", ["chats", "texts", "long"])
@pytest.mark.parametrize("turns", ["auto", "per_turn"])
def test_no_preparation_makes_more_rows_than_the_bound(here: Path, packing: Any, rows: str, turns: Any) -> None:
    texts = [{"text": "ä" * (300 if rows == "long" else 9)}] * 5
    write(here / "rows.jsonl", CHATS if rows == "chats" else texts)
    config = DataConfig(
        path="rows.jsonl",
        packing=packing,
        multi_turn=turns,
        seq_len=32 if rows == "long" else 512,
        cache_dir="cache",
        on_invalid_row="drop",
        max_invalid_fraction=1,
    )
    bound = most_rows(config)
    data = prepare_data(config, ByteTokenizer().build(), seed=0, progress=lambda _: None)
    loader = BatchLoader(
        data.train, global_batch_size=1, microbatch_size=1, dp_rank=0, dp_size=1, seed=0, shuffle=False
    )
    assert bound is not None and loader.steps_per_epoch <= bound
    if packing == "none" and rows != "long" and turns == "per_turn":
        assert bound == len(data.train)  # not only above it


@pytest.mark.parametrize(
    "overrides",
    [
        ["lr_scheduler.warmup_steps=26"],  # 26 trained turns make at most 26 rows: 7 steps
        ["lr_scheduler.warmup_steps=7"],
        ["lr_scheduler=wsd", "lr_scheduler.decay_steps=8"],
        ["lr_scheduler.warmup_steps=90", "train.max_steps=80", "train.epochs=1000"],
        ["lr_scheduler.warmup_steps=90", "train.max_steps=80", "train.epochs=null", "data.path=a/hub-id"],
    ],
)
def test_a_schedule_that_is_longer_than_the_run_can_be_is_refused_with_a_fix(here: Path, overrides: list[str]) -> None:
    overrides = ["data.path=train.jsonl", *overrides]
    (problem,) = problems(*overrides)
    assert problem.keys[0].startswith("lr_scheduler.") and problem.fix is not None
    assert problems(*overrides, *problem.fix.split()) == []


def test_a_schedule_that_may_fit_is_not(here: Path) -> None:
    assert problems("data.path=train.jsonl", "lr_scheduler.warmup_steps=6") == []
    assert problems("data.path=a/hub-id", "lr_scheduler.warmup_steps=600") == []
    assert problems("data.path=train.jsonl", "lr_scheduler.warmup_steps=60", "train.epochs=50") == []


def test_columns_that_no_row_has_are_refused_before_the_queue(here: Path) -> None:
    for overrides in (
        ["data.path=train.jsonl", "data.column_mapping={prompt: question, completion: answer}"],
        ["data.path=rows.jsonl"],
        ["data.datasets=[{path: train.jsonl}, {path: rows.jsonl}]"],
    ):
        write(here / "rows.jsonl", [{"id": "1", "number": 4}])
        (problem,) = problems(*overrides)
        assert problem.keys[0].startswith("data.")
    assert problems("data.path=train.jsonl") == []


def test_a_step_that_needs_more_rows_than_an_epoch_has_is_reported(
    here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = ["data.path=train.jsonl", "train.global_batch_size=32"]  # 26 trained turns make at most 26 rows
    assert problems(*overrides) == []
    (record,) = caplog.records
    assert record.levelname == "WARNING" and vars(record)["code"] == "repeated_rows"
    caplog.clear()
    assert problems(*overrides, *record.getMessage().rpartition("try ")[2].split()) == []
    assert not caplog.records


@pytest.mark.parametrize(
    ("rows", "microbatch", "ranks", "fix"),
    [
        (7, 2, 2, "train.global_batch_size=4"),
        (3, 4, 1, "train.global_batch_size=3 train.microbatch_size=3"),
        (5, 4, 2, "train.global_batch_size=4 train.microbatch_size=2"),
        (1, 1, 2, "more data"),
    ],
)
def test_the_reported_batch_size_divides_over_ranks(
    rows: int, microbatch: int, ranks: int, fix: str, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = {"global_batch_size": 16, "microbatch_size": microbatch, "dp_size": ranks}
    warn_of_repeated_rows(rows, **sizes, row_name="rows")
    assert caplog.records[0].getMessage().endswith(f"try {fix}")
