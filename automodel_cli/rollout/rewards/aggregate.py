"""Weighted sum of several rewards over many samples, with error accounting. Torch-free."""

from __future__ import annotations

import asyncio
import inspect
import math
import queue
import textwrap
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, cast, get_args

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_choice
from automodel_cli.config.warn import warn
from automodel_cli.distributed.device_threads import threads_on_this_device
from automodel_cli.rollout.rewards.base import Many, OnError, RewardFunction, RewardInput, SupportsBatchScoring
from automodel_cli.rollout.rewards.row_checks import applies_to
from automodel_cli.rollout.rewards.worker_process import Helper
from automodel_cli.rollout.types import Score

Judge = Callable[[RewardInput], float | None]
K = TypeVar("K")
Given = float | Exception | None
"""Result of a reward for a sample. None: the reward does not apply."""
Way = Literal["single", "async", "group", "batch"]

_RAISED = (Exception, SystemExit)  # SystemExit too: a script that exits must not end the run
_CONCURRENCY = 32
_MOST_WORDS = 300  # characters of an error that are printed and kept with the sample
_SHOWN = 5  # maximum errors of a reward per call that are logged, each once per run; others are counted


class RewardSum:
    """Score samples with `sum of weight * score` over the named rewards.

    An exception of a reward does not end the run. It counts as `on_error` configures. `num_helpers` worker processes,
    and as many threads, compute rewards with a timeout. Use it as a context manager, or call `close`.

    Example: the rewards math (weight 1) and length (weight 0.5) with scores 1 and -0.4 sum to 0.8.
    """

    def __init__(self, rewards: Mapping[str, RewardFunction], *, num_helpers: int = 2, required: bool = True):
        """`required`: somebody learns from the sum, so it must not be the same for all samples."""
        if required and not rewards:
            raise ConfigError(
                "no reward is configured",
                code="missing_key",
                keys=("rewards",),
                fix=f"rewards.exact._target_={_EXAMPLE}",
            )
        if required and not any(reward.weight != 0 for reward in rewards.values()):
            raise ConfigError(
                "every reward has weight 0, so all samples would have the same reward",
                code="nothing_to_train",
                keys=("rewards",),
            )
        check_nodes(rewards)
        for reward in rewards.values():
            reward.check()
        self.rewards, self._required = dict(rewards), required
        self._silent: set[str] = set()
        self._said: set[tuple[str, str]] = set()
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

    def __call__(self, samples: Sequence[RewardInput]) -> list[Score]:
        """Return the score of each sample, in order. Rewards run concurrently. Rewards without a timeout run one after
        another in this thread, because they may need the main thread."""
        applicable = {name: _judged_by(reward, samples) for name, reward in self.rewards.items()}
        here = [
            name for name, reward in self.rewards.items() if reward.timeout is None and call_kind(reward) == "single"
        ]
        with threads_on_this_device(max(1, len(self.rewards))) as threads:
            elsewhere = {
                name: threads.submit(self._values, reward, [samples[i] for i in applicable[name]])
                for name, reward in self.rewards.items()
                if name not in here
            }
            results_here = {
                name: [_attempt(self.rewards[name].score, samples[i]) for i in applicable[name]] for name in here
            }
            results_here |= {name: values.result() for name, values in elsewhere.items()}
        results = {name: dict(zip(applicable[name], results_here[name], strict=True)) for name in self.rewards}
        if self._required:
            _refuse_nothing(results, len(samples))
        self._report(results, samples)
        return [self._score({name: of[i] for name, of in results.items() if i in of}) for i in range(len(samples))]

    def _values(self, reward: RewardFunction, samples: Sequence[RewardInput]) -> list[Given]:
        way = call_kind(reward)
        if way == "async":
            return asyncio.run(_awaited(reward, samples))
        if way != "single":
            return _together(cast(SupportsBatchScoring, reward), samples)
        judge = reward.score if reward.limits_itself else self._with_helper(reward)
        with threads_on_this_device(self._num_helpers) as threads:
            return list(threads.map(partial(_attempt, judge), samples))

    def close(self) -> None:
        """End the helper processes."""
        for helpers in self._helpers.values():
            for _ in range(self._num_helpers):
                helper = helpers.get()
                helper.close()
                helpers.put(helper)

    def _with_helper(self, reward: RewardFunction) -> Judge:
        helpers = self._helpers[reward.confined]

        def judge(sample: RewardInput) -> float | None:
            helper = helpers.get()
            try:
                return helper.score(reward, sample)
            finally:
                helpers.put(helper)

        return judge

    def _score(self, values: Mapping[str, Given]) -> Score:
        parts = {name: value for name, value in values.items() if isinstance(value, float)}
        errors = {name: _error_line(error) for name, error in _errors(values).items()}
        rules = {self.rewards[name].on_error for name in errors}
        total = sum(self.rewards[name].weight * value for name, value in parts.items())
        return Score(0.0 if "fail" in rules else total, parts, errors, valid="skip" not in rules)

    def _report(self, results: Mapping[str, Mapping[int, Given]], samples: Sequence[RewardInput]) -> None:
        for name, values in results.items():
            if values and all(value is None for value in values.values()) and name not in self._silent:
                self._silent.add(name)
                warn("no_effect", "reward %s returned None for all %d samples (reported once)", name, len(values))
            failed = [(samples[i], error) for i, error in _errors(values).items()]
            new: dict[str, str] = {}
            for sample, error in failed:
                new.setdefault(_error_line(error), sample.name)
            shown = [(words, of) for words, of in new.items() if (name, words) not in self._said][:_SHOWN]
            for words, of in shown:
                self._said.add((name, words))
                warn("reward_failed", "reward %s of %s: %s (on_error=%s)", name, of, words, self.rewards[name].on_error)
            if len(failed) > len(shown):
                warn(
                    "reward_failed",
                    "reward %s: %d more of %d samples failed",
                    name,
                    len(failed) - len(shown),
                    len(samples),
                )


def check_nodes(rewards: Mapping[str, RewardFunction]) -> None:
    """Raise ConfigError for reward classes, including custom ones, that cannot be called."""
    for name, reward in rewards.items():
        check_choice(f"rewards.{name}.on_error", reward.on_error, get_args(OnError))
        kind, several = type(reward).__name__, hasattr(reward, "scores")
        method = cast(SupportsBatchScoring, reward).scores if several else reward.score
        if getattr(method, "__isabstractmethod__", False):
            _reject(name, "invalid_value", f"{kind} must define `{'scores' if several else 'score'}`")
        if not several:
            continue
        per = getattr(reward, "per", None)
        if per not in get_args(Many):
            choices = ", ".join(get_args(Many))
            _reject(name, "invalid_choice", f"`per`={per!r} of {kind} must be one of: {choices} (see BatchReward)")
        if inspect.iscoroutinefunction(method):
            _reject(name, "not_supported", f"{kind}.scores is async, which is not supported: it is called in a thread")
        if reward.timeout is not None and not reward.limits_itself:
            raise ConfigError(
                f"rewards.{name}.timeout={reward.timeout} is not supported, because {kind} scores several "
                "samples at once, without worker processes",
                code="not_supported",
                keys=(f"rewards.{name}.timeout",),
                fix=f"rewards.{name}.timeout=null",
            )


def _reject(name: str, code: str, what: str) -> None:
    raise ConfigError(f"rewards.{name}: {what}", code=code, keys=(f"rewards.{name}",))


_EXAMPLE = "automodel_cli.rollout.rewards.text.ExactAnswer"


def call_kind(reward: RewardFunction) -> Way:
    """How a reward is called: with one sample, with one and awaited, or with several of them."""
    if hasattr(reward, "scores"):  # only a `SupportsBatchScoring` has this method
        return cast(SupportsBatchScoring, reward).per
    return "async" if inspect.iscoroutinefunction(reward.score) else "single"


def _judged_by(reward: RewardFunction, samples: Sequence[RewardInput]) -> list[int]:
    """Return the indices of the samples that a reward scores: rows that match its `filter`."""
    return [i for i, sample in enumerate(samples) if applies_to(reward, sample.row)]


def _refuse_nothing(results: Mapping[str, dict[int, Given]], num_samples: int) -> None:
    """If all applicable rewards of a sample return None, count an error of each reward."""
    for i in range(num_samples):
        results_of_sample = [of for of in results.values() if i in of]
        if all(of[i] is None for of in results_of_sample):
            for of in results_of_sample:
                of[i] = ValueError("gave None, and no other reward judges this sample")


def _together(reward: SupportsBatchScoring, samples: Sequence[RewardInput]) -> list[Given]:
    """Score groups, or all samples, and return the values in the order of the samples."""
    given: dict[int, Given] = {}
    keys = [sample.group if reward.per == "group" else 0 for sample in samples]
    for key in dict.fromkeys(keys):
        numbers = [i for i, of in enumerate(keys) if of == key]
        given |= dict(zip(numbers, _attempt_many(reward, [samples[i] for i in numbers]), strict=True))
    return [given[i] for i in range(len(samples))]


def _attempt_many(reward: SupportsBatchScoring, samples: Sequence[RewardInput]) -> list[Given]:
    try:
        given = reward.scores(samples)
        if given is None:
            raise ValueError(f"gave None and not a list of {len(samples)} scores")
        values = list(given)
        if len(values) != len(samples):
            raise ValueError(f"gave {len(values)} scores for {len(samples)} samples")
    except _RAISED as error:
        return [_error_of(error)] * len(samples)
    return [_number(value) for value in values]


async def _awaited(reward: RewardFunction, samples: Sequence[RewardInput]) -> list[Given]:
    """Up to `concurrency` scores at once."""
    limit = getattr(reward, "concurrency", _CONCURRENCY)  # custom classes may lack the attribute
    places = asyncio.Semaphore(limit)
    asyncio.get_running_loop().set_default_executor(threads_on_this_device(limit))  # of `asyncio.to_thread`

    async def attempt(sample: RewardInput) -> Given:
        async with places:
            try:
                score = cast(Awaitable[float | None], reward.score(sample))
                return _number(await asyncio.wait_for(score, reward.timeout))
            except TimeoutError:
                return TimeoutError(f"took longer than {reward.timeout} s")
            except _RAISED as error:
                return _error_of(error)

    return await asyncio.gather(*map(attempt, samples))


def _attempt(judge: Judge, sample: RewardInput) -> Given:
    try:
        return _number(judge(sample))
    except _RAISED as error:
        return _error_of(error)


def _errors(values: Mapping[K, Given]) -> dict[K, Exception]:
    """Return the calls that failed, with their errors."""
    return {key: value for key, value in values.items() if isinstance(value, Exception)}


def _error_of(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(f"called sys.exit({error})")


def _number(value: Any) -> Given:
    """Convert a value to float. An invalid value of a batch reward is an error of its sample only."""
    if value is None:
        return None
    try:
        number = float(value)
    except OverflowError:
        return ValueError(f"gave a {type(value).__name__} beyond the range of a float, which is no finite number")
    except (TypeError, ValueError):
        return ValueError(f"gave {value!r:.50}, which is no number")
    return number if math.isfinite(number) else ValueError(f"gave {number}, which is no finite number")


def _error_line(error: Exception) -> str:
    """Return an error as one line, truncated. A plain RuntimeError comes from a worker and quotes the error of the
    reward."""
    text = str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}"
    return textwrap.shorten(text, _MOST_WORDS, placeholder=" ...")
