"""Interface of rewards: config classes that return a number for a sample. Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, get_args

from automodel_cli.config.schema import wraps_functions
from automodel_cli.config.value_checks import check_choice, check_range

OnError = Literal["zero", "fail", "skip"]
Many = Literal["group", "batch"]


@dataclass(frozen=True)
class RewardInput:
    """A sample to score.

    `completion`: text without special tokens. `num_tokens`: generated tokens. `finished`: whether it ended with a stop
    token. `row`: row of the dataset (`answer`, `entry`, tests, ...). `messages`: conversation before the completion.
    `name`: name of the sample in messages. Samples with the same `group` answer the same prompt.
    """

    name: str
    completion: str
    row: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    num_tokens: int = 0
    finished: bool = True
    group: int = 0

    def column(self, name: str) -> Any:
        """Return a column of the row. KeyError lists the existing columns."""
        if name not in self.row:
            raise KeyError(f"the row has no column {name!r}: it has {', '.join(sorted(self.row)) or 'none'}")
        return self.row[name]


@wraps_functions("automodel_cli.rollout.rewards.text.FunctionReward")
class RewardFunction(Protocol):
    """Interface of nodes in the `rewards` section. `Reward` implements all but `score`. Custom example:
    examples/own_reward.py."""

    @property
    @abstractmethod
    def weight(self) -> float:
        """Factor of the score."""
        ...

    @property
    @abstractmethod
    def on_error(self) -> OnError:
        """Treatment of errors, timeouts and non-finite scores."""
        ...

    @property
    @abstractmethod
    def timeout(self) -> float | None:
        """Time limit in seconds for one score, in a worker process that is killed afterwards. None: in this process."""
        ...

    @property
    @abstractmethod
    def limits_itself(self) -> bool:
        """Whether `score` keeps to `timeout` by itself, so that no helper process is needed."""
        ...

    @property
    @abstractmethod
    def confined(self) -> bool:
        """Whether the worker process gives up file writes, sockets and subprocesses, because it may evaluate the
        completion."""
        ...

    @abstractmethod
    def check(self) -> None:
        """Raise ConfigError if this machine lacks a requirement (package, isolation).
        Called before the first rollout."""
        ...

    @abstractmethod
    def warm_up(self) -> None:
        """Import slow modules. Called in the worker process, outside every timeout."""
        ...

    @abstractmethod
    def score(self, sample: RewardInput) -> float | None:
        """Return the unweighted score, or None if the reward does not apply. `on_error` handles exceptions. May be
        `async`: up to `concurrency` calls wait concurrently, each up to `timeout`."""
        ...


class SupportsBatchScoring(RewardFunction, Protocol):
    """Interface of rewards that score several samples at once. `BatchReward` implements all but `scores`."""

    @property
    @abstractmethod
    def per(self) -> Many:
        """Samples of one call: all responses to a prompt (`group`), or all samples of this rank and step (`batch`)."""
        ...

    @abstractmethod
    def scores(self, samples: Sequence[RewardInput]) -> Sequence[float | None]:
        """Return an unweighted score or None for each sample, in order. Called in a thread, concurrently with other
        rewards."""
        ...


@dataclass(frozen=True, kw_only=True)
class Reward:
    """Base class of rewards. A subclass defines `score`, which is multiplied by `weight` and added to the others.

    - `on_error` handles exceptions, timeouts and non-finite scores. `zero`: this reward is 0. `fail`: the sample is
      worth 0. `skip`: the sample is excluded from training.
    - `timeout`: time limit in seconds. The score is computed in a worker process, which is killed if it takes longer.
      None: in this process, for code that cannot hang. An `async` score always runs in this process: up to
      `concurrency` calls wait concurrently, each up to `timeout`.
    - `filter`: rows to which the reward applies, by column: `{kind: math}`, `{kind: [math, code]}`. It adds nothing to
      other rows, or if `score` returns None. If all rewards return None for a sample, each of them counts an error.
    """

    limits_itself: ClassVar[bool] = False
    confined: ClassVar[bool] = False

    weight: float = 1.0
    """Weight of the score in the sum of rewards."""
    on_error: OnError = "zero"
    """Result if `score` fails: `zero` (0 for this reward), `fail` (the sample is worth 0) or `skip` (not trained)."""
    timeout: float | None = None
    """Seconds for one score, computed in a worker process. null: no limit, in the main process."""
    concurrency: int = 32
    """Maximum number of concurrent calls of an `async def score`."""
    filter: dict[str, object] = field(default_factory=dict)
    """Rows to which this reward applies, by column: `{kind: math}` or `{kind: [math, code]}`."""

    def __post_init__(self) -> None:
        check_choice("on_error", self.on_error, get_args(OnError), fix="on_error=zero")
        check_range("timeout", self.timeout, above=0, unit="s", fix="timeout=5")
        check_range("concurrency", self.concurrency, at_least=1, fix="concurrency=32")

    @property
    def columns(self) -> tuple[str, ...]:
        """Required columns of every row. Missing columns are reported before the first step."""
        return ()

    def check(self) -> None:
        """Requires nothing."""

    def warm_up(self) -> None:
        """Imports nothing slow."""

    @abstractmethod
    def score(self, sample: RewardInput) -> float | None:
        """See `RewardFunction.score`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class BatchReward(Reward):
    """Base class of rewards that score several samples at once: all responses to a prompt (`per: group`, for rankings,
    votes, diversity), or all samples of a rank and step (`per: batch`, for a model or a server). A subclass defines
    `scores` and enforces `timeout`. An error counts for all samples of the call."""

    limits_itself: ClassVar[bool] = True
    per: ClassVar[Many] = "group"

    @abstractmethod
    def scores(self, samples: Sequence[RewardInput]) -> Sequence[float | None]:
        """See `SupportsBatchScoring.scores`."""
        raise NotImplementedError

    def score(self, sample: RewardInput) -> float | None:
        """The only one of its group."""
        return self.scores([sample])[0]
