"""`automodel verify`: the verdict on a bundled recipe, on one with a mistake in it, and on what cannot be measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.command import automodel
from tests.errors import assert_error

pytestmark = pytest.mark.slow

ROWS = "train.microbatch_size=1"  # quickstart's step is one microbatch, which two stages or ranks cannot share
STAGES = ("mesh.pp_size=2", "mesh.dp_size=1", "pipeline=1f1b", ROWS)
PRETRAINED = ("model.config=null", "model.pretrained=no/such-model")
# An objective that counts the rows of every rank but the first twice: right on one process, wrong on several.
SKEWED = """
import torch.distributed as dist
from automodel_cli.objectives.sft import SFT

class Skewed(SFT):
    def __call__(self, output, batch):
        weight = 2 if dist.is_initialized() and dist.get_rank() > 0 else 1
        return weight * super().__call__(output, batch)
"""


def test_a_bundled_recipe_is_verified(tmp_path: Path) -> None:
    done = automodel(tmp_path, "verify", "-c", "quickstart", *STAGES)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    rows = [line for line in lines if line.startswith(("one rank", "pp2 1f1b")) and line.split()[-2] == "ok"]
    assert len(rows) == 4, done.stdout
    assert lines[-1].startswith("verified: 4 rows give one process's numbers; worst ")
    assert "tolerance 1e-05" in lines[-1]


def test_a_mistake_fails_the_verdict_by_name(tmp_path: Path) -> None:
    (tmp_path / "skewed.py").write_text(SKEWED)
    skewed = ("objective._target_=skewed.Skewed", "--trust-package", "skewed", "--rows", "packed", "--json")
    done = automodel(tmp_path, "verify", "-c", "quickstart", "mesh.dp_size=2", ROWS, *skewed)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["verified"] is False and report["tolerance"] == 1e-5
    one, two = report["table"]
    assert (one["layout"], one["verdict"]) == ("one rank", "ok")
    assert (two["layout"], two["verdict"]) == ("dp2", "WRONG")
    assert two["gradient"] > 1e-2 and two["loss"] > 1e-2 and two["parameter"].startswith("model.")
    assert "NOT verified: 1 of 2 rows" in done.stderr


def test_a_layout_that_is_refused_is_shown_with_its_reason(tmp_path: Path) -> None:
    family = "model.config.model_type=lfm2"  # the library has no tensor-parallel plan for it
    done = automodel(tmp_path, "verify", "-c", "quickstart", family, "mesh.tp_size=2", ROWS, "--rows", "tp2 packed")
    assert done.returncode == 1
    assert "refused" in done.stdout and "Lfm2ForCausalLM has no tensor-parallel plan" in done.stdout
    assert "NOT verified: 2 of 2 rows" in done.stdout


def test_a_config_that_cannot_be_had_is_an_error(tmp_path: Path) -> None:
    done = automodel(tmp_path, "verify", "-c", "quickstart", *PRETRAINED)
    assert done.returncode == 2
    assert_error(done.stderr, "model_not_found", "model.pretrained", values=("no/such-model",))
    assert "model.pretrained (command line)" in done.stderr
    assert "verify needs only a folder with config.json" in done.stderr


def test_a_folder_with_nothing_but_a_config_is_enough(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    fields = {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 24}
    (folder / "config.json").write_text(json.dumps(fields))
    pretrained = ("model.config=null", "model.pretrained=model")
    done = automodel(
        tmp_path, "verify", "-c", "quickstart", *pretrained, "mesh.ep_size=2", "--rows", "ep2 packed", timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gpt_oss: a random copy with 4 layers" in done.stdout
