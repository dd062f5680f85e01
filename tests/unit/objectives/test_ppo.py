"""PPO's value loss and returns by hand, and the settings that cannot go together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.objectives.gae import generalized_advantages
from automodel_cli.objectives.grpo import GRPO
from automodel_cli.objectives.ppo import PPO
from automodel_cli.rollout.config import RolloutConfig
from tests.errors import raises
from tests.unit.objectives.test_vectors import rows_as_batch


def case():
    """Two responses of 2 and 1 tokens; values now, at the rollout, and returns."""
    columns = {
        "advantages_BT": [[1.0, -0.5, 9.0], [2.0, 9.0, 9.0]],
        "sampler_logprobs_BT": [[-1.0, -2.0, 9.0], [-0.5, 9.0, 9.0]],
        "old_logprobs_BT": [[-1.0, -2.0, 9.0], [-0.5, 9.0, 9.0]],
        "old_values_BT": [[0.0, 0.5, 9.0], [0.2, 9.0, 9.0]],
        "returns_BT": [[1.0, 0.5, 9.0], [-1.0, 9.0, 9.0]],
    }
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in columns.items()}
    batch = rows_as_batch(torch.tensor([[0, 1, 1], [0, 1, 0]]), torch.ones(2), **tensors)
    values_BT = torch.tensor([[0.6, 0.45, 5.0], [-0.5, 5.0, 5.0]], dtype=torch.float64, requires_grad=True)
    logprobs_BT = torch.tensor([[-0.9, -2.1, 0.0], [-0.5, 0.0, 0.0]], dtype=torch.float64)
    return HeadOutput(logprobs_BT, torch.zeros_like(logprobs_BT), values_BT), values_BT, batch


def test_the_value_loss_takes_the_larger_of_the_plain_and_the_clipped_error():
    output, values_BT, batch = case()
    objective = PPO(value_coef=0.5, value_clip_range=0.2)
    policy = GRPO()(output, batch)
    # 0.6 is clipped to 0.2: (0.2 - 1)^2; 0.45 stays; -0.5 is clipped to 0: (0 + 1)^2
    want = 0.5 * 0.5 * (0.64 + 0.0025 + 1.0)
    loss = objective(output, batch)
    assert (loss - policy).item() == pytest.approx(want, abs=1e-9)
    loss.backward()
    gradient = values_BT.grad
    assert gradient[0, 1].item() == pytest.approx(0.5 * -0.05) and gradient.count_nonzero() == 1
    measured = objective.measure(output, batch)
    assert measured["value_clip_fraction"] == 2 and measured["return_mean"].item() == pytest.approx(0.5)
    assert measured["value_loss"].item() == pytest.approx(want / 0.5) and set(measured) == set(objective.metrics)


def test_values_within_the_clip_are_not_counted_as_clipped():
    """In float32 `old + (now - old)` is often not `now`."""
    columns = dict.fromkeys(("advantages_BT", "sampler_logprobs_BT", "old_logprobs_BT"), torch.zeros(1, 1001))
    now_BT = torch.randn(1, 1001, generator=torch.Generator().manual_seed(0), requires_grad=True)
    old_BT = (now_BT + 0.05 * torch.rand(1, 1001, generator=torch.Generator().manual_seed(1))).detach()
    columns |= {"old_values_BT": old_BT, "returns_BT": torch.zeros(1, 1001)}
    batch = rows_as_batch(torch.ones(1, 1001), torch.ones(1), **columns)
    output = HeadOutput(torch.zeros(1, 1001), torch.zeros(1, 1001), now_BT)
    measured = PPO(value_clip_range=0.2).measure(output, batch)
    assert measured["value_clip_fraction"] == 0
    assert measured["value_loss"] == PPO(value_clip_range=None).measure(output, batch)["value_loss"]


def test_without_a_clip_it_is_the_squared_error():
    output, _, batch = case()
    values = PPO(value_coef=1.0, value_clip_range=None)(output, batch) - GRPO()(output, batch)
    assert values.item() == pytest.approx(0.5 * (0.16 + 0.0025 + 0.25), abs=1e-9)


def test_without_a_critic_a_token_is_worth_the_discounted_rewards_from_it_on():
    rewards_T = torch.tensor([1.0, 0.0, -2.0, 4.0])
    found = generalized_advantages(rewards_T, torch.zeros(4), gamma=0.5, lam=1.0)
    assert found.tolist() == [1 - 0.5 + 0.5, -1 + 1, -2 + 2, 4]


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"group_size": 1}, "group_size"),
        ({"gamma": 0.9}, "gamma"),
        ({"advantage_estimator": "critic", "leave_one_out": True}, "leave_one_out"),
        ({"advantage_estimator": "batch", "reward_scaling": "batch"}, "reward_scaling"),
        ({"advantage_estimator": "batch", "gae_lambda": 0.9}, "gae_lambda"),
        ({"reward_scaling": "mean", "normalize_advantages": False}, "reward_scaling"),
        ({"advantage_estimator": "critic", "gamma": 1.5}, "gamma"),
    ],
)
def test_advantage_estimators_refuse_what_they_do_not_read(options, key):
    with pytest.raises(ConfigError) as caught:
        replace(RolloutConfig(), **options)
    assert key in caught.value.keys


def test_a_critic_that_learns_nothing_is_refused():
    with raises(ConfigError, "out_of_range", keys=("value_coef",), values=(0,)):
        PPO(value_coef=0)
    with raises(ConfigError, "out_of_range", keys=("value_clip_range",), values=(0,)):
        PPO(value_clip_range=0)
