"""A user's dataset with the methods of the documented protocol, and no others, trains."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.command import automodel, write_config

TASK = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Greetings:
    number: int = 8

    def rows(self, split):
        for i in range(self.number):
            yield {"messages": [{"role": "user", "content": f"{split} {i}"}, {"role": "assistant", "content": "hi"}]}

    def cache_key(self):
        return f"greetings {self.number}"
"""


def test_a_task_that_knows_no_answers_trains_without_the_quiz(tmp_path: Path) -> None:
    (tmp_path / "own_task.py").write_text(TASK)
    write_config(tmp_path)
    overrides = [
        "~data.generator",
        "data.generator={_target_: own_task.Greetings}",
        "train.max_steps=2",
        "checkpoint.every=null",
    ]
    done = automodel(tmp_path, "finetune", "llm", "-c", "tiny.yaml", "--trust-package", "own_task", *overrides)
    assert done.returncode == 0, done.stderr
    assert "accuracy" not in done.stdout and (tmp_path / "runs/tiny/export/model.safetensors").is_file()
    without = TASK.replace("cache_key", "key")
    (tmp_path / "own_task.py").write_text(without)
    refused = automodel(tmp_path, "check", "-c", "tiny.yaml", "--trust-package", "own_task", *overrides)
    assert (
        refused.returncode == 2 and "own_task.Greetings, which lacks cache_key of automodel_cli.data." in refused.stderr
    )
