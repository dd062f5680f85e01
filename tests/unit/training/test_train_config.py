"""Rules of the training section."""

from __future__ import annotations

import pytest

from automodel_cli.config.errors import ConfigError
from automodel_cli.training.train_config import BatchSizeRamp, TrainConfig
from tests.errors import raises


def config(microbatch_size: int = 1, **ramp: int) -> TrainConfig:
    return TrainConfig(128, microbatch_size, max_steps=1, batch_size_ramp=BatchSizeRamp(**ramp))


def test_sizes_of_a_ramp_are_those_of_its_docstring() -> None:
    train = config(start=32, increment=32, rows=96_000)
    assert train.batch_sizes == [32, 64, 96, 128]
    positions = (0, 31_999, 32_000, 63_999, 64_000, 95_999, 96_000, 10**9)
    assert [train.batch_size(position) for position in positions] == [32, 32, 64, 64, 96, 96, 128, 128]
    assert TrainConfig(128, max_steps=1).batch_size(0) == 128


@pytest.mark.parametrize(
    ("ramp", "code"),
    [
        ({"start": 128, "increment": 1, "rows": 9}, "out_of_range"),
        ({"start": 32, "increment": 31, "rows": 9}, "not_divisible"),
        ({"start": 0, "increment": 1, "rows": 9}, "out_of_range"),
        ({"start": 1, "increment": 127, "rows": 0}, "out_of_range"),
    ],
)
def test_a_ramp_that_does_not_reach_the_batch_is_refused(ramp: dict[str, int], code: str) -> None:
    with raises(ConfigError, code):
        config(**ramp)


def test_every_size_must_fit_the_ranks() -> None:
    with raises(ConfigError, "not_divisible", keys=("batch_size_ramp",)):
        config(microbatch_size=4, start=2, increment=2, rows=9)
    train = config(microbatch_size=4, start=4, increment=4, rows=9)
    with raises(
        ConfigError,
        "not_divisible",
        values=(4, 8),
        fix="train.batch_size_ramp.start=8 train.batch_size_ramp.increment=8",
    ):
        train.num_microbatches(2)
