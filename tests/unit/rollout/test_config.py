"""Settings of advantages and rewards that an objective would not read are refused."""

from __future__ import annotations

import pytest

from automodel_cli.config.check import check_config
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.errors import ConfigError
from tests.errors import raises

BASE = ["model.pretrained=org/name", "data.path=train.jsonl"]
GKD = [*BASE, "objective=gkd", "teacher.pretrained=org/teacher"]


@pytest.mark.parametrize(
    "overrides",
    [
        [*GKD, "rollout.advantage_estimator=batch"],
        [*GKD, "rollout.reward_scaling=batch"],
        [*GKD, "rollout.overlong.buffer=16"],
        [*GKD, "rollout.overlong.factor=0.5"],
        [*GKD, "rewards=none", "rollout.dynamic_sampling={max_gen_batches: 2}"],
        [*BASE, "objective=best_of_n", "rollout.leave_one_out=true"],
        [*BASE, "objective=online_dpo", "data.seq_len=4096", "rollout.advantage_estimator=batch"],
    ],
    ids=lambda overrides: " ".join(overrides[2:]),
)
def test_what_the_objective_does_not_read_is_refused(overrides):
    check_config(compose("grpo", overrides[:-1]))
    with raises(ConfigError, "no_effect", keys=(overrides[-1].split("=")[0],)):
        check_config(compose("grpo", overrides))


def test_what_it_reads_is_not():
    check_config(
        compose("grpo", [*GKD, "rollout.dynamic_sampling={max_gen_batches: 2}", "rollout.overlong.filter=true"])
    )
    check_config(compose("grpo", [*BASE, "objective=best_of_n", "rollout.overlong.factor=0.5"]))


def test_groups_that_no_reward_tells_apart_are_refused_before_a_run_that_never_trains():
    distil = [*BASE, "teacher.pretrained=org/teacher", "objective.kl_placement=reward", "objective.kl_coef=1.0"]
    check_config(compose("grpo", distil))  # the default reward tells them apart
    with raises(ConfigError, "unsupported_combination", keys=("rollout.advantage_estimator",)) as error:
        check_config(compose("grpo", [*distil, "rewards=none"]))
    assert error.value.fix is not None
    check_config(compose("grpo", [*distil, "rewards=none", *error.value.fix.split()]))


def test_rewards_that_all_weigh_nothing_are_refused_at_check():
    with raises(ConfigError, "nothing_to_train", keys=("rewards.exact.weight",), fix="rewards.exact.weight=1.0"):
        check_config(compose("grpo", [*BASE, "rewards.exact.weight=0"]))
    check_config(compose("grpo", [*GKD, "rewards.exact.weight=0"]))  # measured, and a teacher says what is good
