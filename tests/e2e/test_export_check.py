"""The end of a run in the shipped precision (bfloat16 under FSDP2), by the real command line: its export, compared."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.e2e.command import TINY, automodel, curve

pytestmark = pytest.mark.slow

DEFAULT = re.sub(r"parallelizer:\n.*\n", "", TINY).replace("{{", "{").replace("}}", "}").replace("{family}", "llama")
SHORT = ("train.max_steps=4", "logging.report=false")
TIED_HEAD = "model.lora={rank: 4, target_modules: [q_proj, lm_head]}"
WRONG = """
from automodel_cli.models.lora import merge as lora_merge
from automodel_cli.training.callback import Callback

class Wrong(Callback):
    def on_step(self, run, step, values):
        if step == 3:
            true = lora_merge.delta
            lora_merge.delta = lambda *args: 2 * true(*args)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert "mp_policy" not in DEFAULT and "dtype" not in DEFAULT
    (tmp_path / "plain.yaml").write_text(DEFAULT)
    return tmp_path


def done(folder: Path, *arguments: str) -> Any:
    result = automodel(folder, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def largest_difference(output: str) -> float:
    return float(re.findall(r"max \|log-prob difference\| (\S+),", output)[-1])


def test_a_run_and_the_export_command_in_the_default_precision(folder: Path) -> None:
    trained = done(folder, "finetune", "llm", "-c", "plain.yaml", *SHORT, "mesh.dp_size=2")
    again = done(folder, "export", "runs/plain", "--out", "again")
    assert max(largest_difference(text.stdout) for text in (trained, again)) < 1e-4, "both sides compute in float32"
    first, second = ((folder / path / "model.safetensors").read_bytes() for path in ("runs/plain/export", "again"))
    assert first == second and not (folder / "again/unverified.json").exists()


def test_an_adapter_on_a_tied_head_is_trained_and_exported_whole_and_in_stages(folder: Path) -> None:
    for name, more in (("whole", ()), ("stages", ("mesh.pp_size=2", "mesh.dp_size=1", "pipeline=1f1b"))):
        trained = done(folder, "finetune", "llm", "-c", "plain.yaml", f"run_name={name}", TIED_HEAD, *SHORT, *more)
        assert largest_difference(trained.stdout) < 1e-4
    runs = [folder / "runs" / name for name in ("whole", "stages")]
    assert curve(runs[1]) == pytest.approx(curve(runs[0]), rel=1e-2)
    exports = [load_file(run / "export/model.safetensors") for run in runs]
    assert exports[0].keys() == exports[1].keys() >= {"lm_head.weight", "model.embed_tokens.weight"}
    assert not json.loads((runs[1] / "export/config.json").read_text())["tie_word_embeddings"]


def test_a_failed_check_keeps_the_export_marks_it_and_says_what_differs(folder: Path) -> None:
    (folder / "wrong.py").write_text(WRONG)
    words = [*SHORT, TIED_HEAD, "checkpoint.save_final=false", "checkpoint.every=2", "train.max_steps=3"]
    words += ["callbacks=[{_target_: wrong.Wrong}]", "optimizer.lr=0.05", "lr_scheduler=constant"]
    failed = automodel(folder, "finetune", "llm", "-c", "plain.yaml", "--trust-package", "wrong", *words)
    run = folder / "runs/plain"
    kept = run / "export-unverified"
    assert failed.returncode == 1 and not (run / "export").exists()
    assert str(kept) in failed.stderr and "runs/plain/checkpoints/step-000002" in failed.stderr
    mark = json.loads((kept / "unverified.json").read_text())
    found = mark["found"]
    assert found["mean"] > found["mean_allowed"] and mark["reason"] in failed.stderr
    assert f"{found['values'][0]:.4f}" in failed.stderr and f"{found['values'][1]:.4f}" in failed.stderr
    weights = load_file(kept / "model.safetensors")
    assert "lm_head.weight" in weights and (kept / "adapter/adapter_model.safetensors").is_file()

    done(folder, "export", "runs/plain")  # the merge is right again
    assert (run / "export/config.json").is_file() and kept.is_dir()


def test_a_check_that_is_switched_off_leaves_a_mark(folder: Path) -> None:
    trained = done(folder, "finetune", "llm", "-c", "plain.yaml", *SHORT, "checkpoint.export_check_minutes=0")
    assert "not compared" in trained.stdout
    mark = folder / "runs/plain/export/unverified.json"
    assert json.loads(mark.read_text())["found"] is None
    done(folder, "export", "runs/plain", "--out", "runs/plain/export")
    assert mark.exists()  # the run's config leaves it out here too
