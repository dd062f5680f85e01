"""Quantization-aware training through the command line: its first step, resuming around it, and training its export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from tests.e2e.command import automodel

pytestmark = pytest.mark.slow

RUN = (
    *("finetune", "llm", "-c", "quickstart", "train.max_steps=6", "lr_scheduler.warmup_steps=0", "logging.every=1"),
    *("data.generator.num_train=400", "data.generator.num_validation=8", "checkpoint.every=2"),
    *("model.qat.weight_dtype=mxfp4", "model.qat.fake_quant_after_n_steps=3"),
)


def run(folder, *arguments):
    done = automodel(folder, *arguments, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(folder: Path, name: str) -> dict[int, float]:
    rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def stored(folder: Path, name: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "runs" / name / "export" / "model.safetensors")


def test_a_run_resumes_bit_for_bit_before_and_after_its_first_quantized_step(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    said = run(tmp_path, *RUN, "run_name=whole")
    assert said.count("quantized to mxfp4") == 2
    run(tmp_path, *RUN, "run_name=plain", "model.qat=null")
    whole, plain = losses(tmp_path, "whole"), losses(tmp_path, "plain")
    assert [whole[step] == plain[step] for step in range(1, 7)] == [True] * 3 + [False] * 3
    tensors = stored(tmp_path, "whole")
    for step in (2, 4):
        checkpoint = tmp_path / "runs" / "whole" / "checkpoints" / f"step-{step:06d}"
        run(tmp_path, *RUN, f"run_name=from-{step}", f"checkpoint.resume={checkpoint}")
        assert losses(tmp_path, f"from-{step}") == {later: whole[later] for later in range(step + 1, 7)}
        again = stored(tmp_path, f"from-{step}")
        assert again.keys() == tensors.keys()
        assert all(torch.equal(again[key], tensors[key]) for key in tensors)
    further = ("model.config=null", "model.pretrained=runs/whole/export", "run_name=further", "model.qat=null")
    run(tmp_path, *RUN, *further, "train.max_steps=1", "optimizer.lr=1e-9", "optimizer.adamw_lr=1e-9")
    export = tmp_path / "runs" / "whole" / "export"
    config = CompressedTensorsConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(export, quantization_config=config).state_dict()
    ours = stored(tmp_path, "further")
    assert all(torch.allclose(ours[key], theirs[key], atol=1e-7, rtol=1e-6) for key in ours)
