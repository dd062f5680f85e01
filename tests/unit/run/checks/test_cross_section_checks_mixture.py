"""Rules between the datasets of a mixture, the objective and the length of a run."""

from __future__ import annotations

import pytest

from automodel_cli.cli.main import run
from automodel_cli.config.errors import ConfigError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.objectives.distillation import Distillation
from automodel_cli.objectives.sft import SFT
from automodel_cli.run.checks.cross_section_checks import check_mixture
from automodel_cli.training.train_config import TrainConfig
from tests.errors import raises

BY_EPOCHS, BY_STEPS = (TrainConfig(8, **length) for length in ({"epochs": 1}, {"max_steps": 9}))

_NEEDED = {"kd": ("teacher.pretrained=larger",), "classifier": ("objective.labels=[a,b]",)}
"""Settings without which a recipe is not built."""


def data(**second: object) -> DataConfig:
    sources = [SourceConfig("a.jsonl", sampling_weight=1), SourceConfig("b.jsonl", **{"sampling_weight": 1, **second})]
    return DataConfig(datasets=sources)


def test_loss_weights_require_an_objective_that_reads_them():
    check_mixture(data(loss_weight=0.5), SFT(), BY_EPOCHS)
    check_mixture(data(), Distillation(), BY_EPOCHS)
    key = "data.datasets.1.loss_weight"
    with raises(ConfigError, "unsupported_combination", keys=(key,), fix=f"{key}=1.0"):
        check_mixture(data(loss_weight=0.5), Distillation(), BY_EPOCHS)


@pytest.mark.parametrize("base", ["dpo", "rm", "classifier", "embedding", "kd", "grpo"])
def test_recipes_whose_loss_has_no_weights_refuse_them(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    datasets = "[{path: a.jsonl, sampling_weight: 1}, {path: b.jsonl, sampling_weight: 1, loss_weight: 0.5}]"
    options = [f"data.datasets={datasets}", "model.pretrained=somewhere", "train.max_steps=5", *_NEEDED.get(base, ())]
    assert run(["check", "-c", base, *options]) == 2
    errors = capsys.readouterr().err
    assert "unsupported_combination" in errors and "data.datasets.1.loss_weight" in errors, errors


def test_weights_by_steps_require_a_number_of_steps():
    changing = data(sampling_weight={"0": 1, "5": 2})
    check_mixture(changing, SFT(), BY_STEPS)
    with raises(ConfigError, "requires_setting", keys=("train.max_steps",), fix="train.max_steps=1000"):
        check_mixture(changing, SFT(), BY_EPOCHS)
