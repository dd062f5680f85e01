"""Several rewards on many samples: a weighted sum, and an account of everything that went wrong. Torch-free."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import queue
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from automodel_cli.config.errors import ConfigError
from automodel_cli.rollout.rewards.base import Judged, JudgesTogether, RewardNode
from automodel_cli.rollout.rewards.helper import Helper

logger = logging.getLogger(__name__)

Judge = Callable[[Judged], float]
Way = Literal["single", "async", "group", "batch"]

_CONCURRENCY = 32
_SHOWN = 5  # errors of one reward that one call prints; the rest is counted


@dataclass(frozen=True)
class Score:
    """What one sample got. `parts` are the rewards before their weights, without those that went wrong; `errors` says
    why those did. `valid` False: leave the sample out of training."""

    total: float
    parts: dict[str, float]
    errors: dict[str, str]
    valid: bool = True


class RewardSum:
    """`sum of weight * score` over the named rewards. A reward that raises never ends the run: it counts as configured.

    `num_helpers` processes and as many threads compute what has a timeout. Use as a context manager, or `close` it.
    """

    def __init__(self, rewards: Mapping[str, RewardNode], *, num_helpers: int = 2, required: bool = True):
        """`required`: somebody learns from the sum, so it must not be the same for all samples."""
        if required and not rewards:
            raise ConfigError("there is no reward", keys=("rewards",), fix=f"rewards.exact._target_={_EXAMPLE}")
        if required and not any(reward.weight != 0 for reward in rewards.values()):
            raise ConfigError("every reward has weight 0: all samples would be worth the same", keys=("rewards",))
        for name, reward in rewards.items():
            reward.check()
            _check_timeout(name, reward)
        self.rewards = dict(rewards)
        self._num_helpers = num_helpers
        self._helpers: dict[bool, queue.SimpleQueue[Helper]] = {}
        for confined in (False, True):
            self._helpers[confined] = queue.SimpleQueue()
            for _ in range(num_helpers):
                self._helpers[confined].put(Helper(confined=confined))

    def __enter__(self) -> RewardSum:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __call__(self, samples: Sequence[Judged]) -> list[Score]:
        """The score of each sample, in order. Rewards judge side by side: those without a timeout, which may be bound
        to the main thread, one after another here, while the others wait for helpers and servers."""
        mine = {name: _judged_by(reward, samples) for name, reward in self.rewards.items()}
        here = [name for name, reward in self.rewards.items() if reward.timeout is None and way_of(reward) == "single"]
        with ThreadPoolExecutor(max(1, len(self.rewards))) as threads:
            elsewhere = {
                name: threads.submit(self._values, reward, [samples[i] for i in mine[name]])
                for name, reward in self.rewards.items()
                if name not in here
            }
            found = {name: [_attempt(self.rewards[name].score, samples[i]) for i in mine[name]] for name in here}
            found |= {name: values.result() for name, values in elsewhere.items()}
        results = {name: dict(zip(mine[name], found[name], strict=True)) for name in self.rewards}
        self._report(results, samples)
        return [self._score({name: of[i] for name, of in results.items() if i in of}) for i in range(len(samples))]

    def _values(self, reward: RewardNode, samples: Sequence[Judged]) -> list[float | Exception]:
        way = way_of(reward)
        if way == "async":
            return asyncio.run(_awaited(reward, samples))
        if way != "single":
            return _together(cast(JudgesTogether, reward), samples)
        judge = reward.score if reward.limits_itself else self._with_helper(reward)
        with ThreadPoolExecutor(self._num_helpers) as threads:
            return list(threads.map(partial(_attempt, judge), samples))

    def close(self) -> None:
        """End the helper processes."""
        for helpers in self._helpers.values():
            for _ in range(self._num_helpers):
                helper = helpers.get()
                helper.close()
                helpers.put(helper)

    def _with_helper(self, reward: RewardNode) -> Judge:
        helpers = self._helpers[reward.confined]

        def judge(sample: Judged) -> float:
            helper = helpers.get()
            try:
                return helper.score(reward, sample)
            finally:
                helpers.put(helper)

        return judge

    def _score(self, values: Mapping[str, float | Exception]) -> Score:
        parts = {name: value for name, value in values.items() if not isinstance(value, Exception)}
        errors = {name: _words(value) for name, value in values.items() if isinstance(value, Exception)}
        rules = {self.rewards[name].on_error for name in errors}
        total = sum(self.rewards[name].weight * value for name, value in parts.items())
        return Score(0.0 if "fail" in rules else total, parts, errors, valid="skip" not in rules)

    def _report(self, results: Mapping[str, Mapping[int, float | Exception]], samples: Sequence[Judged]) -> None:
        for name, values in results.items():
            failed = [(samples[i], v) for i, v in values.items() if isinstance(v, Exception)]
            for sample, error in failed[:_SHOWN]:
                rule = self.rewards[name].on_error
                logger.warning("reward %s of %s: %s (on_error=%s)", name, sample.name, _words(error), rule)
            if len(failed) > _SHOWN:
                logger.warning("reward %s: %d more samples of %d", name, len(failed) - _SHOWN, len(samples))


def _check_timeout(name: str, reward: RewardNode) -> None:
    if way_of(reward) in ("group", "batch") and reward.timeout is not None and not reward.limits_itself:
        raise ConfigError(
            f"rewards.{name}.timeout={reward.timeout}: {type(reward).__name__} judges several samples at a time, which "
            "no helper process does for it",
            keys=(f"rewards.{name}.timeout",),
            fix=f"rewards.{name}.timeout=null",
        )


def check_columns(rewards: Mapping[str, RewardNode], rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse rows (with where they come from) that lack a column which a reward reads. Raises ConfigError."""
    for origin, row in rows:
        for name, reward in rewards.items():
            needed = (*getattr(reward, "columns", ()), *getattr(reward, "only", {}))
            for column in needed:
                if column not in row:
                    have = ", ".join(sorted(row)) or "none"
                    raise ConfigError(
                        f"{origin}: no column {column!r} for rewards.{name}; the row has {have}",
                        keys=(f"rewards.{name}",),
                        fix=f"rewards.{name}.column=<the column>"
                        if column not in getattr(reward, "only", {})
                        else None,
                    )


_EXAMPLE = "automodel_cli.rollout.rewards.text.ExactAnswer"


def way_of(reward: RewardNode) -> Way:
    """How a reward is called: with one sample, with one and awaited, or with several of them."""
    if hasattr(reward, "scores"):  # what sets a `JudgesTogether` apart from a node that judges one at a time
        return cast(JudgesTogether, reward).per
    return "async" if inspect.iscoroutinefunction(reward.score) else "single"


def _judged_by(reward: RewardNode, samples: Sequence[Judged]) -> list[int]:
    """Numbers of the samples that a reward judges: those whose row has what `only` says."""
    only: Mapping[str, Any] = getattr(reward, "only", {})  # a node without our base class judges every row

    def wanted(sample: Judged) -> bool:
        return all(sample.column(name) in (v if isinstance(v, list) else [v]) for name, v in only.items())

    return [i for i, sample in enumerate(samples) if wanted(sample)]


def _together(reward: JudgesTogether, samples: Sequence[Judged]) -> list[float | Exception]:
    """The values of a reward that judges groups, or everything, in the order of the samples."""
    found: dict[int, float | Exception] = {}
    keys = [sample.group if reward.per == "group" else 0 for sample in samples]
    for key in dict.fromkeys(keys):
        numbers = [i for i, of in enumerate(keys) if of == key]
        found |= dict(zip(numbers, _attempt_many(reward, [samples[i] for i in numbers]), strict=True))
    return [found[i] for i in range(len(samples))]


def _attempt_many(reward: JudgesTogether, samples: Sequence[Judged]) -> list[float | Exception]:
    try:
        values = [float(value) for value in reward.scores(samples)]
        if len(values) != len(samples):
            raise ValueError(f"gave {len(values)} scores for {len(samples)} samples")
    except Exception as error:  # whatever a reward raises belongs to its samples
        return [error] * len(samples)
    return [_finite(value) for value in values]


async def _awaited(reward: RewardNode, samples: Sequence[Judged]) -> list[float | Exception]:
    """Up to `concurrency` scores at once."""
    limit = getattr(reward, "concurrency", _CONCURRENCY)  # a node without our base class says nothing of it
    places = asyncio.Semaphore(limit)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(limit))  # of `asyncio.to_thread`

    async def attempt(sample: Judged) -> float | Exception:
        async with places:
            try:
                score = cast(Awaitable[float], reward.score(sample))
                return _finite(float(await asyncio.wait_for(score, reward.timeout)))
            except TimeoutError:
                return TimeoutError(f"took longer than {reward.timeout} s")
            except Exception as error:  # whatever a reward raises belongs to its sample
                return error

    return await asyncio.gather(*map(attempt, samples))


def _attempt(judge: Judge, sample: Judged) -> float | Exception:
    try:
        return _finite(float(judge(sample)))
    except Exception as error:  # whatever a reward raises belongs to its sample
        return error


def _finite(value: float) -> float | Exception:
    return value if math.isfinite(value) else ValueError(f"gave {value}, which is no finite number")


def _words(error: Exception) -> str:
    """A plain RuntimeError is the helper's, and quotes the reward's own error."""
    return str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}"
