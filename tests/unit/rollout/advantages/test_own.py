"""Custom advantage estimators: groups that are trained, errors, and keys without effect."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from automodel_cli.config.check import check_config
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.config.security.trust import Trust
from automodel_cli.objectives.advantages import group_advantages
from automodel_cli.rollout.advantages import own
from automodel_cli.rollout.advantages.base import FunctionEstimator, RewardedSamples
from automodel_cli.rollout.config import RolloutConfig
from tests.errors import raises

EXAMPLES = Path(__file__).parents[4] / "examples"
REWARDS = torch.tensor([1.0, 0.0, 3.0, 2.0, 2.0, 2.0, 5.0, 7.0], dtype=torch.float64)
GROUPS = torch.tensor([4, 4, 4, 9, 9, 9, 2, 2])
VALID = torch.tensor([True] * 6 + [True, False])
SAMPLES = RewardedSamples(REWARDS, GROUPS, VALID, [])


def test_an_estimator_as_the_built_in_one_gives_its_advantages():
    def centered(samples: RewardedSamples) -> torch.Tensor:
        return group_advantages(samples.rewards_N, samples.groups_N, valid_N=samples.valid_N).advantages_N

    want = group_advantages(REWARDS, GROUPS, valid_N=VALID)
    got = own.estimate(FunctionEstimator(centered), SAMPLES)
    assert torch.equal(got.advantages_N, want.advantages_N) and torch.equal(got.differs_N, want.differs_N)


def test_ranks_of_the_example(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from own_advantages import Ranks

    got = own.estimate(Ranks(), SAMPLES)
    assert got.advantages_N.tolist() == [0.0, -1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert got.differs_N.tolist() == [True] * 3 + [False] * 5
    sys.modules.pop("own_advantages")


@pytest.mark.parametrize(
    "result", [torch.zeros(3), torch.full((8,), float("nan")), [0.0] * 8, ValueError("boom")], ids=str
)
def test_a_wrong_result_is_an_error(result):
    def estimator(samples: RewardedSamples):
        if isinstance(result, Exception):
            raise result
        return result

    with raises(RunError, "estimator_failed", keys=("rollout.advantage_estimator",)):
        own.estimate(FunctionEstimator(estimator), SAMPLES)


def test_keys_of_the_built_in_estimators_have_no_effect():
    node = FunctionEstimator(lambda samples: samples.rewards_N)
    assert RolloutConfig(advantage_estimator=node, group_size=1).advantage_estimator is node
    for key, value in {"leave_one_out": True, "normalize_advantages": False, "gamma": 0.5, "gae_lambda": 0.5}.items():
        with raises(ConfigError, "no_effect", keys=(key, "advantage_estimator")):
            RolloutConfig(advantage_estimator=node, **{key: value})


def test_a_bare_function_and_another_class_are_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "my_estimators.py").write_text("def f(samples): ...\nclass C: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    base = ["model.pretrained=x/y", "model.config=null", "data.path=x/y"]
    for name, key in (("f", "rollout.advantage_estimator"), ("C", "rollout.advantage_estimator")):
        with raises(ConfigError, "invalid_target", keys=(key,)):
            override = f"rollout.advantage_estimator={{_target_: my_estimators.{name}}}"
            check_config(compose("grpo", [*base, "rewards=exact", override]), Trust(packages=("my_estimators",)))
