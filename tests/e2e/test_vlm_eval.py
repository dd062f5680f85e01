"""Questions with pictures in `automodel eval` and in validations, against `generate` of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from automodel_cli.run.commands.chat import Speaker, load_pictures
from tests.e2e.command import automodel
from tests.errors import assert_error
from tests.vision import repository, rows

CONFIG = """
defaults: [vlm, _self_]
model: {pretrained: original}
data: {path: data/rows.jsonl, seq_len: 128, packing: none}
parallelizer: {mp_policy: {param_dtype: float32}}
optimizer: {lr: 0.003}
train: {global_batch_size: 4, microbatch_size: 2, max_steps: 2, epochs: null}
lr_scheduler: {warmup_steps: 1}
validation: {every: 2, tasks: {asked: TASK}}
"""
TASK = (
    "{_target_: automodel_cli.evaluation.config.Generation, max_new_tokens: 6, pictures: true, "
    "data: {path: data/questions.jsonl, seq_len: 128}}"
)


def _project(folder: Path) -> None:
    repository("qwen3_vl", folder / "original")
    lines = rows(folder / "data", 8).read_text().splitlines()
    questions = [{**row, "answer": row["messages"][1]["content"]} for row in map(json.loads, lines)]
    (folder / "data/questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    (folder / "tiny.yaml").write_text(CONFIG.replace("TASK", TASK))
    (folder / "asked.yaml").write_text(f"tasks: {{asked: {TASK}}}\n")


def _responses(folder: Path, *arguments: str) -> list[str]:
    done = automodel(folder, "eval", *arguments, "-c", "asked.yaml", "--out", "scores.json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((folder / "scores.json").read_text())
    return [item["responses"][0] for item in next(iter(found["models"].values()))["asked"]["items"]]


@pytest.mark.slow
def test_answers_are_those_of_generate_for_runs_exports_and_validations(tmp_path: Path):
    _project(tmp_path)
    done = automodel(tmp_path, "finetune", "vlm", "-c", "tiny.yaml", "run_name=one", "mesh.dp_size=2")
    assert done.returncode == 0, done.stdout + done.stderr
    of_run = _responses(tmp_path, "one", "--alone")
    export = tmp_path / "runs/one/export"
    assert of_run == _responses(tmp_path, str(export))
    speaker, expected = Speaker.load("export", str(export)), []
    for row in map(json.loads, (tmp_path / "data/questions.jsonl").read_text().splitlines()):
        speaker.forget()
        shown = load_pictures([speaker], [str(tmp_path / "data" / name) for name in row["images"]])
        # The rows write a space after each tag, so the conversation is given in parts.
        text = row["messages"][0]["content"].replace("<image>", "")
        pieces = speaker.answer(text, {"max_new_tokens": 6, "do_sample": False}, shown)
        expected.append("".join(pieces).strip())
    assert [text.strip() for text in of_run] == expected
    metrics = [json.loads(line) for line in (tmp_path / "runs/one/metrics.jsonl").read_text().splitlines()]
    assert any("val_asked_accuracy" in row for row in metrics)


@pytest.mark.parametrize(
    ("conf", "overrides", "code", "key"),
    [
        ("tiny.yaml", ("+validation.tasks.asked.temperature=1.0",), "unsupported_combination", "temperature"),
        ("tiny.yaml", ("model.vision=null", "_target_=automodel_cli.recipes.sft.SFTRecipe"), "bad_rows", ""),
    ],
)
def test_what_tasks_with_pictures_cannot_do_is_refused(
    conf: str, overrides: tuple[str, ...], code: str, key: str, tmp_path: Path
):
    _project(tmp_path)
    done = automodel(tmp_path, "finetune", "llm", "-c", conf, *overrides)
    assert done.returncode != 0
    assert_error(done.stdout + done.stderr, code, *([key] if key else []))


def test_choices_with_pictures_are_refused(tmp_path: Path):
    _project(tmp_path)
    row = {"question": "<image>what is here", "choices": ["one", "two"], "answer": 0, "images": ["0_0.png"]}
    (tmp_path / "choices.jsonl").write_text(json.dumps(row) + "\n")
    task = "{_target_: automodel_cli.evaluation.config.MultipleChoice, path: choices.jsonl}"
    (tmp_path / "choices.yaml").write_text(f"tasks: {{choices: {task}}}\n")
    done = automodel(tmp_path, "eval", "original", "-c", "choices.yaml")
    assert done.returncode != 0
    assert_error(done.stdout + done.stderr, "bad_rows", values=("choices.jsonl:1", "images"))
