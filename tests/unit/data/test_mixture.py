"""Names, shares and phases of `data.datasets`, and the configs that are rejected."""

from __future__ import annotations

import pytest

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.mixture import Mixture
from automodel_cli.data.source_config import SourceConfig
from tests.errors import raises


def of(*sources: dict) -> Mixture:
    return DataConfig(datasets=[SourceConfig(**{"path": f"{i}.jsonl", **s}) for i, s in enumerate(sources)]).mixture()


def test_weights_become_shares():
    mixture = of({"sampling_weight": 3}, {"sampling_weight": 1, "loss_weight": 0.5})
    assert mixture.phases == ((0, (0.75, 0.25)),) and mixture.loss_weights == (1.0, 0.5)
    assert mixture.describe(1) == "25% of the tokens, loss weight 0.5"


def test_weights_by_steps_begin_at_0_before_their_first_step():
    mixture = of({"sampling_weight": {"0": 1, "100": 3}}, {"sampling_weight": {"50": 1}}, {"sampling_weight": 0})
    assert mixture.phases == ((0, (1.0, 0.0, 0.0)), (50, (0.5, 0.5, 0.0)), (100, (0.75, 0.25, 0.0)))
    assert mixture.changes and not of({"sampling_weight": {"0": 1, "9": 1}}, {"sampling_weight": 1}).changes


def test_names_come_from_paths_and_do_not_repeat():
    paths = ["a/web.jsonl.gz", "b/web.parquet", "org/set-v1.5", "c/*.jsonl", "s3://bucket/tok/code.bin"]
    mixture = of(*({"path": path} for path in paths), {"path": "x.jsonl", "label": "web_2"})
    assert mixture.names == ("web", "web_3", "set-v1.5", "c", "code", "web_2")
    assert of({"path": "org/set", "name": "en"}, {"path": "org/set"}).names == ("set-en", "set")


@pytest.mark.parametrize(
    ("sources", "code", "fix"),
    [
        ([{"sampling_weight": 1}, {}], "requires_setting", "data.datasets.1.sampling_weight=1.0"),
        ([{"sampling_weight": 0}, {"sampling_weight": 0}], "out_of_range", "data.datasets.0.sampling_weight=1.0"),
        ([{"sampling_weight": {"5": 1}}, {"sampling_weight": 0}], "out_of_range", None),
        ([{"sampling_weight": -1}, {"sampling_weight": 1}], "out_of_range", None),
        ([{"sampling_weight": float("nan")}], "out_of_range", None),
        ([{"sampling_weight": {"1.5": 1}}], "out_of_range", None),
        ([{"sampling_weight": 1, "epochs": 2}], "mutually_exclusive", None),
        ([{"loss_weight": -1}], "out_of_range", None),
        ([{"loss_weight": 0}, {"loss_weight": 0}], "out_of_range", "data.datasets.0.loss_weight=1.0"),
        ([{"label": "a"}, {"label": "a"}], "ambiguous", "data.datasets.0.label=a_1"),
        ([{"label": "my set"}], "invalid_value", "label=my_set"),
    ],
)
def test_what_does_not_fit_together_is_rejected(sources, code, fix):
    with raises(ConfigError, code, fix=fix) if fix else raises(ConfigError, code):
        of(*sources)
