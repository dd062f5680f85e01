"""Several rewards on many samples: a weighted sum, and an account of everything that went wrong. Torch-free."""

from __future__ import annotations

import logging
import math
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from automodel_cli.config.errors import ConfigError
from automodel_cli.rollout.rewards.base import Judged, RewardNode
from automodel_cli.rollout.rewards.helper import Helper

logger = logging.getLogger(__name__)

Judge = Callable[[Judged], float]

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

    def __init__(self, rewards: Mapping[str, RewardNode], *, num_helpers: int = 2):
        if not rewards:
            raise ConfigError("there is no reward", keys=("rewards",), fix=f"rewards.exact._target_={_EXAMPLE}")
        if not any(reward.weight != 0 for reward in rewards.values()):
            raise ConfigError("every reward has weight 0: all samples would be worth the same", keys=("rewards",))
        for reward in rewards.values():
            reward.check()
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
        """The score of each sample, in order."""
        results: dict[str, list[float | Exception]] = {}
        with ThreadPoolExecutor(self._num_helpers) as threads:
            for name, reward in self.rewards.items():
                if reward.timeout is None:
                    results[name] = [_attempt(reward.score, sample) for sample in samples]
                else:
                    judge = reward.score if reward.limits_itself else self._with_helper(reward)
                    results[name] = list(threads.map(partial(_attempt, judge), samples))
        self._report(results, samples)
        return [self._score({name: values[i] for name, values in results.items()}) for i in range(len(samples))]

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

    def _report(self, results: Mapping[str, Sequence[float | Exception]], samples: Sequence[Judged]) -> None:
        for name, values in results.items():
            failed = [(s, v) for s, v in zip(samples, values, strict=True) if isinstance(v, Exception)]
            for sample, error in failed[:_SHOWN]:
                rule = self.rewards[name].on_error
                logger.warning("reward %s of %s: %s (on_error=%s)", name, sample.name, _words(error), rule)
            if len(failed) > _SHOWN:
                logger.warning("reward %s: %d more samples of %d", name, len(failed) - _SHOWN, len(samples))


_EXAMPLE = "automodel_cli.rollout.rewards.text.ExactAnswer"


def _attempt(judge: Judge, sample: Judged) -> float | Exception:
    try:
        value = float(judge(sample))
    except Exception as error:  # whatever a reward raises belongs to its sample
        return error
    return value if math.isfinite(value) else ValueError(f"gave {value}, which is no finite number")


def _words(error: Exception) -> str:
    """A plain RuntimeError is the helper's, and quotes the reward's own error."""
    return str(error) if type(error) is RuntimeError else f"{type(error).__name__}: {error}"
