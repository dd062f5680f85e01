"""Classes of one's own in a config: what lacks something is refused by the name of what is missing."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from automodel_cli.config.check import check_config
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.security.trust import Trust
from automodel_cli.rollout.rewards.base import RewardInput
from tests.errors import raises

MODULE = """
from dataclasses import dataclass
from automodel_cli.data.formats.base import Format
from automodel_cli.distributed.strategies.base import ParallelizerConfig
from automodel_cli.rollout.environments.base import Environment, Turn
from automodel_cli.rollout.rewards.base import Reward, BatchReward

@dataclass(frozen=True)
class NoShard(ParallelizerConfig):
    pass

@dataclass(frozen=True, kw_only=True)
class NoScore(Reward):
    pass

@dataclass(frozen=True, kw_only=True)
class Scores(Reward):
    def score(self, sample):
        return 1.0

@dataclass(frozen=True, kw_only=True)
class NoStep(Environment):
    pass

class Bare:
    pass

class NoCall:
    def weight(self, batch):
        return batch.num_label_tokens

class NoRead(Format):
    fields = ("q",)
    makes = "conversations"

class NoScores(BatchReward):
    pass

def right(completion, answer) -> float:
    return float(completion == answer)

class Free:
    max_turns, weight, on_error = 0, 1.0, "zero"
    concurrency, retries, turn_timeout, episode_timeout, tools = 1, 0, None, None, ()
    def check(self):
        pass
    def close(self):
        pass
    async def ended(self, state):
        return 0.0
    def step(self, messages, row, state):
        return Turn()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(MODULE)
    (tmp_path / "runs/quickstart/export").mkdir(parents=True)
    return tmp_path


def build(conf: str, *overrides: str) -> Any:
    return check_config(compose(conf, overrides), Trust(packages=("mine",)))


@pytest.mark.parametrize(
    ("conf", "override", "message"),
    [
        ("quickstart", "parallelizer={_target_: mine.NoShard}", "mine.NoShard, which lacks shard of automodel_cli."),
        (
            "quickstart",
            "data.format={_target_: mine.NoRead}",
            "mine.NoRead, which lacks read of automodel_cli.data.formats.base",
        ),
        (
            "quickstart",
            "data.format={_target_: mine.Bare}",
            "which lacks fields, makes, read of automodel_cli.data.formats.base",
        ),
        ("quickstart", "objective={_target_: mine.NoCall}", "lacks __call__ of automodel_cli.objectives.base"),
        (
            "quickstart",
            "lr_scheduler={_target_: mine.Bare}",
            "lacks build of automodel_cli.training.optimizers.lr_scheduler",
        ),
        ("quickstart", "optimizer={_target_: torch.optim.AdamW}", "torch.optim.AdamW, which lacks build of"),
        (
            "quickstart",
            "data.generator={_target_: mine.Bare}",
            "lacks cache_key, rows of automodel_cli.data.",
        ),
        ("quickstart", "logging.trackers=[{_target_: mine.Bare}]", "lacks start of automodel_cli.training.trackers"),
        (
            "quickstart_grpo",
            "rewards.own={_target_: mine.NoScore}",
            "mine.NoScore, which lacks score of automodel_cli.",
        ),
        (
            "quickstart_grpo",
            "rewards.own={_target_: mine.NoScores}",
            "mine.NoScores, which lacks scores of automodel_cli.",
        ),
        (
            "quickstart_grpo",
            "rewards.own={_target_: mine.right}",
            "mine.right",
        ),
        (
            "quickstart_grpo",
            "rollout.environment={_target_: mine.NoStep}",
            "mine.NoStep, which lacks step of automodel_cli.",
        ),
        (
            "quickstart_grpo",
            "rollout.environment={_target_: mine.Free}",
            "rollout.environment.max_turns=0 must be at least 1",
        ),
    ],
)
def test_a_node_is_told_what_it_lacks(conf: str, override: str, message: str) -> None:
    code = "out_of_range" if "Free" in override else "invalid_target"
    with raises(ConfigError, code) as caught:
        build(conf, override)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "override",
    [
        "rewards.own={_target_: mine.right, weight: 0.25}",
        "rewards.own={function: {_target_: mine.right, _partial_: true}, weight: 0.25}",
    ],
)
def test_what_is_said_of_a_bare_function_makes_a_reward_of_it(override: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build("quickstart_grpo", override)
    assert caught.value.fix is not None
    reward = build("quickstart_grpo", override, shlex.split(caught.value.fix)[0]).rewards["own"]
    assert reward.columns == ("answer",) and reward.weight == 0.25
    assert reward.score(RewardInput("s", "7", {"answer": "7"})) == 1.0


def test_a_tracker_that_is_none_is_answered_with_the_nearest() -> None:
    names = ("'wandbb'", "tensorboard", "wandb", "mlflow", "trackio")
    with raises(ConfigError, "invalid_choice", keys=("logging.trackers.0",), values=names) as caught:
        build("quickstart", "logging.trackers=[wandbb]")
    assert "logging.trackers.0=wandb" in str(caught.value)


def test_an_object_may_have_any_type() -> None:
    values = {"a": "add", "b": 7, "c": True, "d": None, "e": ["add", False], "f": {"of": [1.5]}}
    override = "rewards.exact.filter={a: add, b: 7, c: true, d: null, e: [add, false], f: {of: [1.5]}}"
    assert build("quickstart_grpo", override).rewards["exact"].filter == values


OWN = "rewards.own={_target_: mine.Scores}"


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ((), ["exact"]),
        ((OWN,), ["own"]),
        ((OWN, "rewards=exact"), ["exact", "own"]),
        ((OWN, "rewards.exact.weight=2.0"), ["exact", "own"]),
        (("rewards.exact.weight=2.0",), ["exact"]),
    ],
)
def test_own_rewards_take_the_place_of_the_default_one(overrides: tuple[str, ...], names: list[str]) -> None:
    assert sorted(build("quickstart_grpo", *overrides).rewards) == names


def test_the_rewards_section_of_a_file_takes_the_place_of_the_default_one(folder: Path) -> None:
    section = "rewards: {own: {_target_: mine.Scores}}\n"
    (folder / "mine_only.yaml").write_text("defaults: [quickstart_grpo, _self_]\n" + section)
    composed = compose("mine_only.yaml")
    assert list(check_config(composed, Trust(packages=("mine",))).rewards) == ["own"]
    assert "exact" not in composed.to_yaml(), "a saved config says what was trained with"
    (folder / "both.yaml").write_text("defaults: [quickstart_grpo, override rewards: exact, _self_]\n" + section)
    assert sorted(build("both.yaml").rewards) == ["exact", "own"]
