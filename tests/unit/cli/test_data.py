"""`automodel data prepare`: parts by option and by Slurm array, and the joined result."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from automodel_cli.cli.data import ShardType, _array_task
from automodel_cli.cli.main import run
from automodel_cli.config.errors import ConfigError
from automodel_cli.data.sources import spans
from tests.errors import raises
from tests.unit.data.helpers import write_jsonl

CONFIG = """
defaults: [pretrain, _self_]
model:
  config: {model_type: llama, vocab_size: 354}
  tokenizer: {_target_: automodel_cli.models.tokenizer.ByteTokenizer}
data: {path: rows.jsonl, seq_len: 64, num_workers: 0, cache_dir: cache}
"""


@pytest.mark.parametrize("value", ["3/3", "-1/3", "1", "a/b", "0/0", "1/2/3"])
def test_other_parts_are_refused(value: str) -> None:
    with pytest.raises(click.BadParameter, match="must be I/N"):
        ShardType().convert(value, None, None)


def test_the_tasks_of_a_slurm_array_are_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    assert _array_task() == (0, 1)
    for name, value in {"ID": "5", "MIN": "4", "MAX": "7", "COUNT": "4"}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    assert _array_task() == (1, 4)
    monkeypatch.setenv("SLURM_ARRAY_TASK_MAX", "10")  # --array=4-10:2
    with raises(ConfigError, "invalid_value", values=(4, 10), fix="sbatch --array=0-3"):
        _array_task()


def test_parts_are_prepared_one_by_one_and_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(spans, "SHARD_BYTES", 1000)
    Path("my.yaml").write_text(CONFIG)
    write_jsonl(tmp_path / "rows.jsonl", [{"text": f"Row {n}. " * 9} for n in range(40)])
    assert run(["data", "prepare", "-c", "my.yaml", "--shard", "1/2"]) == 0
    assert "part 1 of 2 is complete; 2 shards of other parts are not" in capsys.readouterr().out
    assert run(["data", "prepare", "-c", "my.yaml", "--shard", "0/2"]) == 0
    assert "40 rows (text, detected)" in capsys.readouterr().out
    entries = sorted(Path("cache").iterdir())
    assert run(["data", "prepare", "-c", "my.yaml"]) == 0
    assert sorted(Path("cache").iterdir()) == entries and not list(Path("cache").glob("*.shards"))
