"""Validation files of each dataset of a mixture: their rows, metrics columns and errors."""

from __future__ import annotations

from dataclasses import replace

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.preparation.pipeline import prepare_data
from automodel_cli.data.preparation.preview import head_problems
from automodel_cli.data.source_config import SourceConfig
from tests.errors import raises
from tests.unit.data.helpers import tiny_tokenizer, write_jsonl


def test_validation_rows_of_each_dataset_belong_to_it(tmp_path):
    names = ("a", "b", "held_a", "held_c")
    paths = {
        name: write_jsonl(tmp_path / f"{name}.jsonl", [{"body": f"{name} {n}"} for n in range(4)]) for name in names
    }
    columns = {"format": "text", "column_mapping": {"text": "body"}}
    sources = [
        SourceConfig(str(paths["a"]), loss_weight=0.5, validation_path=str(paths["held_a"]), **columns),
        SourceConfig(str(paths["b"]), **columns),
        SourceConfig(str(paths["a"]), label="c", loss_weight=2.0, validation_path=str(paths["held_c"]), **columns),
    ]
    config = DataConfig(datasets=sources, seq_len=64, cache_dir=str(tmp_path / "cache"), packing="none", num_workers=0)
    validation = prepare_data(config, tiny_tokenizer(), seed=0).validation
    assert [name for name, _ in validation.contents] == ["held_a.jsonl", "held_c.jsonl"]
    batch = validation.collate([0, 7])
    assert batch.extra["sources_B"].tolist() == [0, 2] and batch.extra["loss_weights_B"].tolist() == [0.5, 2.0]
    for more in ({"validation_size": 0.1}, {"validation_path": "x.jsonl"}):
        with raises(ConfigError, "mutually_exclusive", keys=(next(iter(more)), "datasets")):
            replace(config, **more)
    missing = replace(sources[1], validation_path=str(tmp_path / "none.jsonl"))
    (problem,) = head_problems(replace(config, datasets=[sources[0], missing]), kind="documents", prompts=False)
    assert (problem.code, problem.keys) == ("missing_file", ("data.datasets.1.validation_path",))
