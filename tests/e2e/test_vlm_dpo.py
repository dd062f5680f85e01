"""Preference optimization on pairs with pictures through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.command import automodel
from tests.errors import assert_error
from tests.vision import pairs, repository

CONFIG = """
defaults: [dpo_vlm, _self_]
model: {pretrained: original}
data: {path: data/rows.jsonl, seq_len: 128, validation_size: 4}
parallelizer: {mp_policy: {param_dtype: float32}}
optimizer: {lr: 0.003}
train: {global_batch_size: 4, microbatch_size: 1, max_steps: 3, epochs: null}
lr_scheduler: {warmup_steps: 1}
"""
TOWER = ("model.lora={rank: 4}", "model.vision.tower=adapters", "model.vision.projector=adapters")
LORA = ("model.lora={rank: 4}", "model.vision.tower=frozen", "model.vision.projector=frozen")


def _train(folder: Path, name: str, *overrides: str) -> list[dict]:
    done = automodel(folder, "dpo", "llm", "-c", "tiny.yaml", f"run_name={name}", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "once for each microbatch" in done.stdout
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def _project(folder: Path) -> Path:
    repository("qwen3_vl", folder / "original")
    pairs(folder / "data", 24)
    (folder / "tiny.yaml").write_text(CONFIG)
    return folder


KTO = ("objective=kto", "data.path=data/judged.jsonl")


def _judged(folder: Path) -> None:
    rows = map(json.loads, (folder / "data/rows.jsonl").read_text().splitlines())
    judged = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen", "images": row["images"]}
        for row in rows
        for side in ("chosen", "rejected")
    ]
    (folder / "data/judged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in judged))


@pytest.mark.nightly
def test_sources_of_the_reference_and_numbers_of_ranks_train_alike(tmp_path: Path):
    _project(tmp_path)
    for variants in (
        {"precomputed": (), "copy": ("reference_mode=frozen_copy",), "ranks": ("mesh.dp_size=2",)},
        {
            "off": LORA,
            "before": (*LORA, "reference_mode=precomputed"),
            "stages": (*LORA, "mesh.pp_size=2", "pipeline=1f1b"),
        },
        {"tower off": TOWER, "tower before": (*TOWER, "reference_mode=precomputed")},
        {"kto": KTO, "kto2": (*KTO, "mesh.dp_size=2")},
    ):
        if "kto" in variants:
            _judged(tmp_path)
        one, *others = (_train(tmp_path, name, *overrides) for name, overrides in variants.items())
        for other in others:
            for a, b in zip(one, other, strict=True):
                assert abs(a["loss"] - b["loss"]) < 2e-6 * a["loss"]
                assert abs(a["grad_norm"] - b["grad_norm"]) < 2e-5 * a["grad_norm"]
    samples = json.loads((tmp_path / "runs/precomputed/run.json").read_text())["samples"]
    assert samples and all(sample["pictures"] for sample in samples)


def test_rows_whose_pictures_are_not_in_the_prompt_are_refused_by_line(tmp_path: Path):
    _project(tmp_path)
    path = tmp_path / "data/rows.jsonl"
    lines = path.read_text().splitlines()
    row = json.loads(lines[2])
    lines[2] = json.dumps({**row, "images": [*row["images"], "missing.png"]})
    path.write_text("\n".join(lines) + "\n")
    done = automodel(tmp_path, "dpo", "llm", "-c", "tiny.yaml")
    assert done.returncode != 0
    assert_error(done.stdout + done.stderr, "bad_rows", values=("rows.jsonl:3", "image tags"))


def test_folders_of_pictures_without_a_vision_model_are_refused(tmp_path: Path):
    _project(tmp_path)
    done = automodel(tmp_path, "dpo", "llm", "-c", "tiny.yaml", "model.vision=null", "data.media_dir=data")
    assert done.returncode != 0
    assert_error(done.stdout + done.stderr, "no_effect", "data.media_dir")
