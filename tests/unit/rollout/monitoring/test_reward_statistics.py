"""What several samples to a prompt say of it, counted by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.preparation.prompt_dataset import Prompt
from automodel_cli.rollout.config import RolloutConfig
from automodel_cli.rollout.monitoring.health_monitor import HealthMonitor
from automodel_cli.rollout.monitoring.reward_statistics import is_wrong, of_k_samples
from automodel_cli.rollout.rollout_result import Rollout
from automodel_cli.rollout.types import Account, Sample, Score
from tests.errors import raises


def sample(place: int, index: int, total: float, source: str = "a", *, failed: bool = False, **parts: float) -> Sample:
    prompt = Prompt(place, [1, 2], [], {"source": source}, f"prompt {place}")
    return Sample(
        place,
        index,
        prompt,
        [3],
        [-1.0],
        "",
        "stop",
        0,
        Score(total, parts, {"judge": "away"} if failed else {}, not failed),
    )


def test_a_prompt_is_passed_by_one_sample_that_every_reward_finds_right():
    samples = [
        sample(0, 0, 1.5, exact=1.0, form=0.5),  # a higher reward than any other, and not right
        sample(0, 1, 0.0, exact=0.0, form=0.0),
        sample(1, 0, 1.2, exact=1.0, form=1.0),
        sample(1, 1, 0.3, exact=0.0, form=1.0),
    ]
    found = of_k_samples(samples)
    assert found["val_avg_at_k"] == pytest.approx(0.75)
    assert found["val_best_at_k"] == pytest.approx(1.35)
    assert found["val_pass_at_k"] == 0.5


def test_groups_all_right_and_all_wrong_and_rewards_by_source_are_told_apart():
    totals = {0: (1.0, 1.0), 1: (0.0, 0.0), 2: (1.0, 0.0), 3: (0.5, 0.5)}
    samples = [
        sample(place, index, total, "ab"[place % 2], exact=total)
        for place, of_group in totals.items()
        for index, total in enumerate(of_group)
    ]
    nothing = torch.zeros(8)
    told = Rollout(0, samples, nothing, nothing.bool(), [], [], 1, 16, 24, 1.0, 0.25, None, {}).unshown
    assert (told["num_solved_groups"], told["num_failed_groups"]) == (1, 1)
    assert (told["reward_source_a"], told["reward_source_b"]) == (0.75, 0.25)
    assert (told["generate_seconds"], told["generate_tokens_per_second"]) == (0.75, pytest.approx(24 / 0.75))


def test_samples_left_out_after_an_error_count_in_no_mean():
    samples = [
        sample(0, 0, 1.0, exact=1.0),
        sample(0, 1, 0.0, failed=True),
        sample(1, 0, 1.0, "b", exact=1.0),
        sample(1, 1, 0.5, "b", exact=0.5),
        sample(2, 0, 0.0, failed=True),
        sample(2, 1, 9.0, failed=True, exact=1.0),  # the rest of a sum that is not known
    ]
    assert of_k_samples(samples) == {
        "val_avg_at_k": pytest.approx(2.5 / 3),
        "val_best_at_k": 1.0,  # of two prompts: the third was not judged
        "val_pass_at_k": 1.0,
    }
    differs = torch.tensor([False, False, True, True, False, False])
    rollout = Rollout(0, samples, torch.zeros(6), differs, [], [], 1, 6, 6, 1.0, 0.25, None, {})
    assert rollout.shown["reward"] == pytest.approx(2.5 / 3)
    told = rollout.unshown
    assert (told["num_excluded"], told["reward_errors"], told["num_zero_std_groups"]) == (3, 3, 0)
    assert told["reward_std"] == pytest.approx((1 / 18) ** 0.5)
    assert told["reward_exact"] == pytest.approx(2.5 / 3)  # the mean reward, whose only part it is
    assert (told["reward_source_a"], told["reward_source_b"]) == (1.0, 0.75)
    assert rollout.failures == {"exact": (0, 4), "judge": (3, 3)}
    assert all(math.isnan(value) for value in of_k_samples(samples[4:]).values())
    assert is_wrong(sample(3, 0, 0.0, exact=0.0)) and not is_wrong(sample(3, 0, 0.0, failed=True, exact=0.0))


def test_an_environment_that_fails_is_told_once_and_not_as_a_reward_too():
    lost = dataclasses.replace(
        sample(0, 0, 0.0),
        finish_reason="error",
        score=Score(0.0, {}, {"environment": "away"}, valid=False),
        account=Account(),
        environment="environment",
    )
    rollout = Rollout(0, [lost], torch.zeros(1), torch.tensor([False]), [], [], 1, 1, 1, 1.0, 0.25, None, {})
    alarms = HealthMonitor(max_new_tokens=8)
    *_, said = [alarms.of({**rollout.unshown, "truncation_rate": 0.0}, rollout.failures) for _ in range(5)]
    assert len(said) == 1 and "failed in their environment" in said[0]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"validation_samples": -1}, "out_of_range"),
        ({"validation_temperature": 0.6}, "requires_setting"),
        ({"validation_temperature": 0.0, "validation_samples": 2}, "out_of_range"),
    ],
)
def test_refused(options, code):
    with raises(ConfigError, code, keys=tuple(options), values=tuple(options.values())):
        RolloutConfig(**options)
