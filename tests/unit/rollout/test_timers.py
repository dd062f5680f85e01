"""Where the time of a step goes."""

from __future__ import annotations

import pytest

from automodel_cli.rollout.timers import Idle


@pytest.mark.parametrize(
    ("draws_elsewhere", "share"),
    [(True, (6 + 2) / 16), (False, 2 / 16)],
    ids=["disaggregated", "colocated"],
)
def test_gpus_that_draw_the_samples_themselves_are_idle_only_while_rewards_judge(draws_elsewhere, share):
    """8 s of drawing and judging, 2 of them judging; 8 s of training."""
    told = Idle.of_rollout(8.0, 2.0, draws_elsewhere=draws_elsewhere).of_step(16.0)
    assert told["idle_generate_seconds"] == (6.0 if draws_elsewhere else 0.0)
    assert told["idle_reward_seconds"] == 2.0 and told["trainer_idle_fraction"] == share
