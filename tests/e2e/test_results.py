"""results/: the first steps of bundled recipes are what they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.command import automodel, curve
from tests.pages import ROOT

FIRST_STEPS = json.loads((ROOT / "results" / "first_steps.json").read_text())
COMMANDS = {"quickstart": "finetune", "quickstart_dpo": "dpo", "quickstart_rm": "rm"}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", FIRST_STEPS)
def test_the_first_steps_are_those_on_record(recipe: str, tmp_path: Path) -> None:
    """The learning rate is still rising in all of them, so the length of the run does not matter."""
    few = ("train.max_steps=60", "logging.report=false")
    done = automodel(tmp_path, COMMANDS[recipe], "llm", "-c", recipe, *few)
    assert done.returncode == 0, done.stdout + done.stderr
    want = FIRST_STEPS[recipe]["loss"]
    assert curve(tmp_path / "runs" / recipe)[: len(want)] == pytest.approx(want, rel=1e-2)
