"""A run that needs more memory than there is: what it says, and that the command it names goes on."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.e2e.command import automodel, metrics, write_config

pytestmark = pytest.mark.slow

GREEDY = """
import torch
from automodel_cli.training.callback import Callback

class Greedy(Callback):
    def __init__(self, how, step=3):
        self.how, self.step = how, step

    def on_step(self, run, step, values):
        if step == self.step:
            if self.how == "cpu":
                torch.empty(1 << 60, dtype=torch.uint8)
            if self.how == "python":
                bytearray(1 << 60)
            if self.how == "cuda":
                text = "CUDA out of memory. Tried to allocate 2.30 GiB. GPU 0 has a total capacity of 79.1 GiB."
                raise RuntimeError("stage 0 failed") from torch.OutOfMemoryError(text)
"""
CALLBACK = "callbacks=[{{_target_: greedy.Greedy, how: {how}}}]"
FEW = ("train.max_steps=4", "checkpoint.every=2", "train.microbatch_size=4", "logging.report=false")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("cpu", "rank 0 of 1 ran out of memory on the CPU: can't allocate memory: you tried to allocate 1152921504606"),
        ("python", "rank 0 of 1 ran out of memory on the CPU: MemoryError"),
        ("cuda", "rank 0 of 1 ran out of memory on the GPU: CUDA out of memory. Tried to allocate 2.30 GiB"),
    ],
)
def test_a_run_without_memory_says_what_was_resident_what_frees_some_and_how_to_go_on(
    tmp_path: Path, how: str, said: str
) -> None:
    write_config(tmp_path)
    (tmp_path / "greedy.py").write_text(GREEDY)
    own = ("--trust-package", "greedy", CALLBACK.format(how=how))
    ended = automodel(tmp_path, "finetune", "llm", "-c", "tiny.yaml", *own, *FEW)
    assert ended.returncode == 4 and said in ended.stderr
    assert "Traceback" not in ended.stderr
    for part in (
        "by plan: parameters",
        "gradients",
        "optimizer",
        "activations",
        "parallelizer.activation_checkpointing",
    ):
        assert part in ended.stderr, part
    lines = ended.stderr.splitlines()
    assert any("model.dtype=bfloat16   (changes the training result)" in line for line in lines)
    (fix,) = (line.split(maxsplit=1)[1] for line in lines if line.startswith("  fix"))
    traced = [line for line in lines if "automodel dryrun -c " in line]
    assert ["runs/tiny/config.yaml --gpus 1 " in line for line in traced] == [True] * (how == "cuda")
    if how != "cpu":
        return
    command = fix.partition("   (resumes from step-000002)")[0]
    *resume, change = shlex.split(command)
    assert resume[:2] == ["automodel", "resume"] and "=" in change
    more = automodel(tmp_path, *resume[1:], change, "callbacks=[]")
    assert more.returncode == 0, more.stderr
    assert [row["step"] for row in metrics(tmp_path / "runs/tiny") if "loss" in row] == [1, 2, 3, 4]
