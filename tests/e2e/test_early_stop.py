"""A run that stops early: what it exports, and how commands name its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.command import automodel, metrics, write_config

pytestmark = pytest.mark.slow

SCORES = """
from automodel_cli.training.callback import Callback

class Scores(Callback):
    def on_validation(self, run, step, values):
        return {"val_score": {1: 0.2, 2: 0.7, 3: 0.6, 4: 0.7}.get(step, 0.0)}
"""


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_the_best_checkpoint_is_exported_and_named(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text(SCORES)
    words = ["validation.metric=val_score", "validation.direction=max", "validation.every=1", "validation.patience=2"]
    words += ["train.max_steps=6", "checkpoint.every=null", "data.generator.num_validation=4", "logging.report=false"]
    words += ["callbacks=[{_target_: scores.Scores}]", "--trust-package", "scores", "lr_scheduler=constant"]
    done = automodel(tmp_path, str(write_config(tmp_path)), *words)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "tiny"
    assert [row["step"] for row in metrics(run) if "loss" in row] == [1, 2, 3, 4]
    assert "validation.patience=2, after step 4" in done.stdout
    saved = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert saved == ["best", "step-000001", "step-000002", "step-000004"]

    for choice in ("best", "last"):
        exported = automodel(tmp_path, "export", "tiny", "--checkpoint", choice, "--out", choice)
        assert exported.returncode == 0, exported.stderr
    assert weights(run / "export") == weights(tmp_path / "best")
    assert weights(run / "export") != weights(tmp_path / "last")

    (line,) = (line.strip() for line in done.stdout.splitlines() if "automodel resume" in line)
    assert line.partition("    ")[0] == "automodel resume runs/tiny validation.patience=null"
    further = automodel(tmp_path, *line.partition("    ")[0].split()[1:])
    assert further.returncode == 0, further.stderr
    assert [row["step"] for row in metrics(run) if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert weights(run / "export") != weights(tmp_path / "best")

    tasks = tmp_path / "quiz.yaml"
    choice = {"question": "?", "choices": ["a", "b"], "answer": 0}
    (tmp_path / "quiz.jsonl").write_text(json.dumps(choice) + "\n")
    tasks.write_text(
        "_target_: automodel_cli.evaluation.config.EvalConfig\n"
        "tasks: {quiz: {_target_: automodel_cli.evaluation.config.MultipleChoice, path: quiz.jsonl}}\n"
    )
    judged = automodel(tmp_path, "eval", "tiny", "-c", "quiz.yaml", "--alone", "--checkpoint", "best")
    assert judged.returncode == 0 and "tiny (step 2)" in judged.stdout, judged.stderr
    assert (run / "eval" / "quiz-best.json").is_file()
