"""The real command line on a config of a few seconds, in warm processes (tests/warm.py), or cold where that counts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests import warm

TINY = """
defaults: [sft, _self_]
model:
  config:
    model_type: {family}
    vocab_size: 354  # ByteTokenizer's; a family's own would be most of what a run computes
    hidden_size: 64
    intermediate_size: 128
    num_hidden_layers: 2
    num_attention_heads: 4
    num_key_value_heads: 2
    head_dim: 16
    tie_word_embeddings: true
  tokenizer: {{_target_: automodel_cli.models.tokenizer.ByteTokenizer}}
data:
  generator: {{_target_: automodel_cli.data.synthetic.chat_tasks.ChatTasks, num_train: 400, num_validation: 16}}
  seq_len: 64
parallelizer:
  mp_policy: {{_target_: automodel_cli.distributed.config.MixedPrecision, param_dtype: float32}}
optimizer: {{lr: 1e-3}}
train: {{global_batch_size: 4, microbatch_size: 1, max_steps: 20, epochs: null}}
checkpoint: {{every: 10}}
"""


def write_config(folder: Path, *, family: str = "llama", name: str = "tiny") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(TINY.format(family=family))
    return path


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "AUTOMODEL_CACHE": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "XDG_STATE_HOME": str(folder / "state"),
    }


def automodel(folder: Path, *arguments: str, timeout: float = 240) -> Any:
    """Run `automodel ARGUMENTS` in `folder` to its end; the result has returncode, stdout and stderr."""
    return warm.run(arguments, folder, environment(folder), timeout)


def cold(folder: Path, *arguments: str, launcher: tuple[str, ...] = (), timeout: float = 240) -> Any:
    """The same in new interpreters, as a user starts them; `launcher` is what stands before `-m automodel_cli`."""
    command = [sys.executable, *launcher, "-m", "automodel_cli", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=timeout, check=False
    )


def start(folder: Path, *arguments: str) -> warm.Command:
    """`automodel` without waiting; stderr goes where stdout goes."""
    return warm.Command(arguments, folder, environment(folder), stderr_to_stdout=True)


def start_cold(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """The same in new interpreters, whose ranks can be told apart by their environment."""
    return subprocess.Popen(
        [sys.executable, "-m", "automodel_cli", *arguments],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_step(process: Any, run: Path, step: int) -> None:
    """Until the run's metrics.jsonl has that step; its output where it ends before."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if (run / "metrics.jsonl").exists() and any(row["step"] >= step for row in metrics(run)):
            return
        if process.poll() is not None:
            raise AssertionError(process.communicate()[0])
        time.sleep(0.005)
    raise AssertionError(f"no step {step} within two minutes")


def kill_after_step(process: Any, run: Path, step: int) -> None:
    """kill -9, once the run's metrics.jsonl has that step and before its end."""
    wait_for_step(process, run, step)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (run / "export").exists(), "it was killed too late to show anything"


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def curve(run: Path, key: str = "loss") -> list[float]:
    """One value per training step."""
    return [row[key] for row in metrics(run) if key in row]
