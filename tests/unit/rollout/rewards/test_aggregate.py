"""Rewards that judge groups, batches, or wait for others; which rows each judges; that none waits for another."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import pytest

from automodel_cli.config.errors import ConfigError
from automodel_cli.rollout.rewards.aggregate import RewardSum
from automodel_cli.rollout.rewards.base import BatchReward, Many, Reward, RewardInput
from automodel_cli.rollout.rewards.row_checks import check_reward_rows
from automodel_cli.rollout.rewards.text import ExactAnswer, FunctionReward, Length
from tests.errors import raises


def judged(completion: str, group: int = 0, **row: object) -> RewardInput:
    return RewardInput(f"{completion} of {group}", completion, dict(row), group=group)


@dataclass(frozen=True, kw_only=True)
class Rank(BatchReward):
    """The place of each among the completions it is compared with, the longest first."""

    calls: list[list[str]] = field(default_factory=list)

    def scores(self, samples: Sequence[RewardInput]) -> list[float]:
        self.calls.append([sample.completion for sample in samples])
        if any(sample.completion == "raise" for sample in samples):
            raise ValueError("cannot rank this")
        order = sorted((len(sample.completion) for sample in samples), reverse=True)
        return [float(order.index(len(sample.completion))) for sample in samples]


@dataclass(frozen=True, kw_only=True)
class RankOfAll(Rank):
    per: ClassVar[Many] = "batch"


SAMPLES = [judged("a", 7), judged("bb", 3), judged("ccc", 7), judged("dddd", 3)]


def test_a_group_is_judged_together_and_scores_find_their_samples():
    rank = Rank()
    assert [score.total for score in RewardSum({"rank": rank})(SAMPLES)] == [1.0, 1.0, 0.0, 0.0]
    assert sorted(rank.calls) == [["a", "ccc"], ["bb", "dddd"]]


def test_a_batch_is_everything():
    rank = RankOfAll()
    assert [score.total for score in RewardSum({"rank": rank})(SAMPLES)] == [3.0, 2.0, 1.0, 0.0]
    assert rank.calls == [["a", "bb", "ccc", "dddd"]]


def test_an_error_of_a_group_is_that_of_its_samples_alone():
    scores = RewardSum({"rank": Rank(on_error="skip")})([*SAMPLES, judged("raise", 3)])
    assert [score.valid for score in scores] == [True, False, True, False, False]
    assert scores[1].errors == {"rank": "ValueError: cannot rank this"}


def test_a_number_for_each_sample_is_asked_for():
    @dataclass(frozen=True, kw_only=True)
    class Short(BatchReward):
        def scores(self, samples: Sequence[RewardInput]) -> list[float]:
            return [1.0]

    (first, _) = RewardSum({"short": Short()})([judged("a"), judged("b")])
    assert first.errors == {"short": "ValueError: gave 1 scores for 2 samples"}


@pytest.mark.parametrize("per", ["group", "batch"])
def test_one_value_that_is_no_number_is_an_error_of_its_sample_alone(per):
    @dataclass(frozen=True, kw_only=True)
    class Some(BatchReward):
        def scores(self, samples: Sequence[RewardInput]) -> list[Any]:
            return [1, None, "0.5", "good", math.inf, 10**400, 10**6000]

    Some.per = per
    scores = RewardSum({"some": Some()})([judged(text) for text in "abcdefg"])
    assert [score.parts for score in scores] == [{"some": 1.0}, {}, {"some": 0.5}, *[{}] * 4]
    assert all("range of a float" in score.errors["some"] for score in scores[5:])
    none, good, infinite = (scores[i].errors["some"] for i in (1, 3, 4))
    assert none.startswith("ValueError: gave None") and "'good'" in good and "inf" in infinite


@dataclass(frozen=True, kw_only=True)
class Even(Reward):
    """Not for odd lengths."""

    def score(self, sample: RewardInput) -> float | None:
        return None if len(sample.completion) % 2 else 3.0


def even(completion: str) -> float | None:
    return None if len(completion) % 2 else 3.0


@pytest.mark.parametrize("timeout", [None, 30.0])
@pytest.mark.parametrize("kind", [Even, partial(FunctionReward, function=even)])
def test_none_leaves_a_reward_out_of_a_sum_as_nan_does_in_trl(kind, timeout):
    even = kind(weight=0.5, timeout=timeout, on_error="skip")
    with RewardSum({"even": even, "length": Length(max_tokens=4, soft_limit=0)}) as rewards:
        odd, both = rewards([judged("a"), judged("ab")])
    assert (odd.valid, odd.errors, list(odd.parts)) == (True, {}, ["length"]) and odd.total == odd.parts["length"]
    assert both.parts["even"] == 3.0 and both.total == 1.5 + both.parts["length"]


def test_none_of_every_reward_of_a_sample_is_an_error_where_the_sum_is_learnt_from():
    odd, even = RewardSum({"even": Even(on_error="skip")})([judged("a"), judged("ab")])
    assert not odd.valid and "no other reward judges" in odd.errors["even"] and even.total == 3.0
    (measured,) = RewardSum({"even": Even()}, required=False)([judged("a")])
    assert (measured.valid, measured.errors, measured.parts) == (True, {}, {})


def test_a_reward_that_gives_none_for_everything_is_told_once(caplog):
    rewards = RewardSum({"even": Even(), "length": Length(max_tokens=4, soft_limit=0)})
    for _ in range(2):
        rewards([judged("a"), judged("abc")])
    assert [r.getMessage() for r in caplog.records if "None for all 2 samples" in r.getMessage()] == [
        caplog.records[0].getMessage()
    ]


@dataclass(frozen=True, kw_only=True)
class NothingTogether(BatchReward):
    def scores(self, samples):
        return None


def test_the_same_error_is_said_once_in_a_run_and_counted_after_that(caplog):
    rewards = RewardSum({"together": NothingTogether()})
    for _ in range(2):
        first, second = rewards([judged("a"), judged("b")])
    assert first.errors == second.errors == {"together": "ValueError: gave None and not a list of 2 scores"}
    said = [record.getMessage() for record in caplog.records]
    assert [("gave None" in line, line.rpartition(": ")[2]) for line in said if "together" in line] == [
        (True, "gave None and not a list of 2 scores (on_error=zero)"),
        (False, "1 more of 2 samples failed"),
        (False, "2 more of 2 samples failed"),
    ]


def test_a_reward_that_exits_costs_its_samples_only():
    @dataclass(frozen=True, kw_only=True)
    class Exits(Reward):
        def score(self, sample: RewardInput) -> float:
            sys.exit(3)

    @dataclass(frozen=True, kw_only=True)
    class ExitsLater(Reward):
        async def score(self, sample: RewardInput) -> float:
            sys.exit("no")

    rewards = {"now": Exits(on_error="skip"), "later": ExitsLater(), "length": Length(max_tokens=4, soft_limit=0)}
    (score,) = RewardSum(rewards)([judged("a")])
    assert not score.valid and score.errors == {"now": "called sys.exit(3)", "later": "called sys.exit(no)"}


def test_a_long_error_is_kept_as_one_line_that_can_be_read():
    @dataclass(frozen=True, kw_only=True)
    class Long(Reward):
        def score(self, sample: RewardInput) -> float:
            raise ValueError("the page\n" * 1000)

    (score,) = RewardSum({"long": Long(timeout=None)})([judged("a")])
    assert len(score.errors["long"]) <= 300 and score.errors["long"].startswith("ValueError: the page the page")


@dataclass(frozen=True, kw_only=True)
class Waits(Reward):
    """Waits for `seconds` without a core."""

    seconds: float = 0.0
    most: list[int] = field(default_factory=lambda: [0, 0])

    async def score(self, sample: RewardInput) -> float:  # type: ignore[override]
        self.most[0] += 1
        self.most[1] = max(self.most)
        await asyncio.sleep(self.seconds if sample.completion != "hang" else 60)
        self.most[0] -= 1
        return float(len(sample.completion))


def test_awaited_rewards_wait_at_once_up_to_a_number():
    waits = Waits(seconds=0.05, concurrency=4)
    assert [score.total for score in RewardSum({"waits": waits})([judged("x" * n) for n in range(12)])] == [*range(12)]
    assert waits.most[1] == 4


def test_an_awaited_reward_that_hangs_costs_its_sample_only():
    began = time.monotonic()
    slow, good = RewardSum({"waits": Waits(timeout=0.2)})([judged("hang"), judged("ok")])
    assert time.monotonic() - began < 30
    assert slow.errors == {"waits": "TimeoutError: took longer than 0.2 s"} and good.total == 2.0


def test_rewards_do_not_wait_for_one_another():
    """Each holds on until the other has begun: one after the other, neither would end."""
    begun = {"a": threading.Event(), "b": threading.Event()}

    @dataclass(frozen=True, kw_only=True)
    class Meets(BatchReward):
        mine: str
        other: str

        def scores(self, samples: Sequence[RewardInput]) -> list[float]:
            begun[self.mine].set()
            return [float(begun[self.other].wait(30)) for _ in samples]

    rewards = {"a": Meets(mine="a", other="b"), "b": Meets(mine="b", other="a")}
    assert [score.parts for score in RewardSum(rewards)([judged("x")])] == [{"a": 1.0, "b": 1.0}]


def test_a_reward_judges_the_rows_that_it_is_for():
    rewards = RewardSum({"sum": ExactAnswer(filter={"kind": ["add", "subtract"]}), "any": ExactAnswer(weight=0.5)})
    rows = [judged("4", answer="4", kind="add"), judged("b", answer="b", kind="letters")]
    assert [score.total for score in rewards(rows)] == [1.5, 0.5]
    assert [sorted(score.parts) for score in rewards(rows)] == [["any", "sum"], ["any"]]


ROWS = [("a.jsonl:1", {"answer": "4", "kind": "add"}), ("a.jsonl:2", {"kind": "code", "tests": ["1"]})]


@pytest.mark.parametrize(
    ("rewards", "code", "key", "values"),
    [
        ({"exact": ExactAnswer()}, "unknown_name", "rewards.exact", ("a.jsonl:2", "answer", "kind, tests")),
        ({"exact": ExactAnswer(filter={"source": "x"})}, "unknown_name", "rewards.exact", ("a.jsonl:1", "source")),
        (
            {"exact": ExactAnswer(filter={"kind": "add"})},
            "unknown_name",
            "rewards.exact.filter",
            ("a.jsonl:2", "rewards.exact.filter={'kind': 'add'}"),
        ),
        (
            {"exact": ExactAnswer(column="kind"), "code": ExactAnswer(filter={"kind": ["cod"]})},
            "no_effect",
            "rewards.code.filter",
            ("cod", "kind: 'add', 'code'"),
        ),
    ],
)
def test_rows_and_rewards_that_are_not_for_each_other_are_refused_before_anything_is_drawn(rewards, code, key, values):
    with raises(ConfigError, code, keys=(key,), values=values):
        check_reward_rows(rewards, ROWS, all_judged=True)


def test_a_misspelt_column_is_told_the_one_that_was_meant():
    for column, fix in (("answr", "answer"), ("solution", "<the column>")):
        with pytest.raises(ConfigError) as error:
            check_reward_rows({"exact": ExactAnswer(column=column)}, ROWS, all_judged=True)
        assert error.value.fix == f"rewards.exact.column={fix}"


def test_every_value_of_a_filter_is_that_of_a_row():
    exact = ExactAnswer(filter={"kind": ["add", "coed"]})
    with pytest.raises(ConfigError) as error:
        check_reward_rows({"exact": exact}, ROWS, all_judged=False)
    assert error.value.keys == ("rewards.exact.filter.kind",) and "'coed'" in error.value.message
    assert error.value.fix == "'rewards.exact.filter.kind=[add,code]'"


def test_a_row_needs_the_columns_of_the_rewards_that_judge_it_alone():
    check_reward_rows({"exact": ExactAnswer(filter={"kind": "add"})}, ROWS, all_judged=False)
    exact, code = ExactAnswer(filter={"kind": "add"}), ExactAnswer(column="tests", filter={"kind": "code"})
    check_reward_rows({"exact": exact, "code": code}, ROWS, all_judged=True)


@dataclass(frozen=True, kw_only=True)
class NotOfMany(Reward):
    def scores(self, samples: Sequence[RewardInput]) -> list[float]:
        return [0.0] * len(samples)


@dataclass(frozen=True, kw_only=True)
class Misspelt(Rank):
    per: ClassVar[str] = "prompt"  # type: ignore[assignment, misc]


@dataclass(frozen=True, kw_only=True)
class AwaitedByNobody(Rank):
    async def scores(self, samples: Sequence[RewardInput]) -> list[float]:  # type: ignore[override]
        return [0.0] * len(samples)


@dataclass(frozen=True, kw_only=True)
class Empty(Reward):
    pass


@dataclass(frozen=True, kw_only=True)
class EmptyOfMany(BatchReward):
    pass


@pytest.mark.parametrize(
    ("reward", "code", "values"),
    [
        (NotOfMany(), "invalid_choice", ("per",)),
        (Misspelt(), "invalid_choice", ("prompt", "group, batch")),
        (AwaitedByNobody(), "not_supported", ("AwaitedByNobody.scores",)),
        (Empty(), "invalid_value", ("Empty", "score")),
        (EmptyOfMany(), "invalid_value", ("EmptyOfMany", "scores")),
    ],
)
def test_a_class_that_could_not_be_called_is_refused(reward, code, values):
    with raises(ConfigError, code, keys=("rewards.mine",), values=values):
        RewardSum({"mine": reward})


def test_a_timeout_that_nobody_would_keep_is_refused():
    @dataclass(frozen=True, kw_only=True)
    class Unlimited(BatchReward):
        limits_itself: ClassVar[bool] = False

        def scores(self, samples: Sequence[RewardInput]) -> list[float]:
            return []

    with raises(
        ConfigError, "not_supported", keys=("rewards.mine.timeout",), values=(1.0,), fix="rewards.mine.timeout=null"
    ):
        RewardSum({"mine": Unlimited(timeout=1.0)})
