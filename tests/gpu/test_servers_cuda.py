"""Runs that start vLLM on GPUs and send it their weights: on the GPU that trains, and from one GPU to another."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.real_servers import RUN, saved
from tests.unit.rollout.engines.servers.test_http_engine_servers import free_port

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(shutil.which("vllm") is None, reason="needs the program vllm"),
]
_STEPS = 4


def words_of(folder: Path, transport: str) -> list[str]:
    """Write the config of a run to `folder`, and return the words of its command."""
    (folder / "run.yaml").write_text(RUN.replace("MODEL", str(saved(folder / "model"))))
    servers = f"{{num_servers: 1, gpus_per_server: 1, port: {free_port()}, gpu_memory_utilization: 0.3}}"
    placement = "colocated" if transport == "ipc" else "null"
    return [
        *("grpo", "llm", "-c", str(folder / "run.yaml"), "rollout=vllm", f"rollout.placement={placement}"),
        *(f"rollout.engine.transport={transport}", f"rollout.engine.servers={servers}", "rollout.engine.timeout=120"),
        *(f"train.max_steps={_STEPS}", "mesh.dp_size=1", "checkpoint.every=null", f"output_dir={folder / 'run'}"),
    ]


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_a_run_starts_vllm_and_samples_with_the_weights_of_each_step(transport: str, tmp_path: Path):
    """The learning rate moves log-probs by far more than the tolerance, so outdated weights are found."""
    if transport == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0" if transport == "ipc" else "0,1"}
    command = [sys.executable, "-m", "automodel_cli", *words_of(tmp_path, transport)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "run").rglob("metrics.jsonl")
    rows = [row for row in map(json.loads, path.read_text().splitlines()) if "loss" in row]
    assert [row["weight_version"] for row in rows] == list(range(_STEPS))
    for row in rows:
        assert row["live_servers"] == 1
        assert row["token_mult_prob_error"] == pytest.approx(1.0, abs=0.05)
