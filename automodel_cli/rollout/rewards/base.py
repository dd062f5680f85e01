"""What a reward is: a config node that gives one judged sample a number. Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, get_args

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.schema import wraps_functions

OnError = Literal["zero", "fail", "skip"]
Many = Literal["group", "batch"]


def check_on_error(value: str, key: str | None = None) -> None:
    """Refuse what is no rule for errors. `key`: where it stands in a recipe; null: in the node itself."""
    if value not in get_args(OnError):
        raise ConfigError(
            f"on_error={value!r} must be one of: {', '.join(get_args(OnError))}",
            code="invalid_choice",
            keys=(key or "on_error",),
            fix=None if key else "on_error=zero",
        )


@dataclass(frozen=True)
class RewardInput:
    """One completion in front of the rewards.

    `completion` is its text without special tokens, `num_tokens` what was generated, `finished` whether it ended by
    itself. `row` is the dataset's row (`answer`, `entry`, tests, ...) and `messages` the conversation before the
    completion. `name` says which sample it is in messages to the user. Samples of one `group` answer the same prompt.
    """

    name: str
    completion: str
    row: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    num_tokens: int = 0
    finished: bool = True
    group: int = 0

    def column(self, name: str) -> Any:
        """A column of the row; KeyError says what there is."""
        if name not in self.row:
            raise KeyError(f"the row has no column {name!r}: it has {', '.join(sorted(self.row)) or 'none'}")
        return self.row[name]


@wraps_functions("automodel_cli.rollout.rewards.text.FunctionReward")
class RewardFunction(Protocol):
    """What a node of the `rewards` section must have; `Reward` has all but `score` (examples/own_reward.py)."""

    @property
    @abstractmethod
    def weight(self) -> float:
        """What the score is multiplied by."""
        ...

    @property
    @abstractmethod
    def on_error(self) -> OnError:
        """What counts when `score` raises, runs out of time or gives no finite number."""
        ...

    @property
    @abstractmethod
    def timeout(self) -> float | None:
        """Seconds for one score, in a helper process that is killed after them; None: in this process."""
        ...

    @property
    @abstractmethod
    def limits_itself(self) -> bool:
        """Whether `score` keeps to `timeout` by itself, so that no helper process is needed."""
        ...

    @property
    @abstractmethod
    def confined(self) -> bool:
        """Whether the helper process, which may evaluate what the completion says, gives up writing files, sockets and
        processes first."""
        ...

    @abstractmethod
    def check(self) -> None:
        """Raise ConfigError for what this machine lacks (an extra, isolation). Called before the first rollout."""
        ...

    @abstractmethod
    def warm_up(self) -> None:
        """Import what is slow to import. Called in the helper process, and counts against no timeout."""
        ...

    @abstractmethod
    def score(self, sample: RewardInput) -> float | None:
        """What the sample is worth before the weight, None where the reward is not for it; any exception counts as
        `on_error` says. May be `async`: up to
        `concurrency` of them wait at once, each up to `timeout`."""
        ...


class SupportsBatchScoring(RewardFunction, Protocol):
    """A node that judges several samples at a time; `BatchReward` has all but `scores`."""

    @property
    @abstractmethod
    def per(self) -> Many:
        """What `scores` is given: all responses to one prompt (`group`), or all of this rank's step (`batch`)."""
        ...

    @abstractmethod
    def scores(self, samples: Sequence[RewardInput]) -> Sequence[float | None]:
        """A number for each sample, or None, in order, before the weight. Called in a thread beside other rewards."""
        ...


@dataclass(frozen=True, kw_only=True)
class Reward:
    """One reward. A subclass defines `score`; what it returns is multiplied by `weight` and summed with the others.

    `on_error` says what counts when `score` raises, runs out of time or gives no finite number: `zero` counts 0 for
    this reward, `fail` makes the whole sample worth 0, `skip` leaves the sample out of training. `timeout` in seconds:
    the score is computed in a helper process that is killed when it takes longer; None computes it right here, for code
    that cannot hang. Where `score` is an `async def` it stays in this process: up to `concurrency` wait at once, each
    up to `timeout`.

    `filter`: rows that this reward judges, by column: `{kind: math}`, `{kind: [math, code]}`. For others it adds
    nothing,
    nor where `score` returns None; a sample of which all rewards give None is an error of each of them.
    """

    limits_itself: ClassVar[bool] = False
    confined: ClassVar[bool] = False

    weight: float = 1.0
    """Weight of the score in the sum of rewards."""
    on_error: OnError = "zero"
    """Treatment of a failed score: `zero` (0 for this reward), `fail` (the sample is worth 0) or `skip` (excluded
    from training)."""
    timeout: float | None = None
    """Seconds for one score, computed in a worker process. null: no limit, in the main process."""
    concurrency: int = 32
    """Maximum number of concurrent calls of an `async def score`."""
    filter: dict[str, Any] = field(default_factory=dict)
    """Rows that this reward scores, by column: `{kind: math}` or `{kind: [math, code]}`."""

    def __post_init__(self) -> None:
        check_on_error(self.on_error)
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(
                f"timeout={self.timeout} s must be above 0", code="out_of_range", keys=("timeout",), fix="timeout=5"
            )
        if self.concurrency < 1:
            raise ConfigError(
                f"concurrency={self.concurrency} must be at least 1",
                code="out_of_range",
                keys=("concurrency",),
                fix="concurrency=32",
            )

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have; a run whose rows lack one is refused before its first step."""
        return ()

    def check(self) -> None:
        """Nothing is lacking."""

    def warm_up(self) -> None:
        """Nothing is slow to import."""

    @abstractmethod
    def score(self, sample: RewardInput) -> float | None:
        """See `RewardFunction.score`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class BatchReward(Reward):
    """A reward that is called with several samples: those of one prompt (`per: group`: rankings, votes, diversity) or
    all of a rank's step (`per: batch`: a model of its own, a server). A subclass defines `scores`.

    An error counts for all the samples of the call. `timeout` is the subclass's to keep.
    """

    limits_itself: ClassVar[bool] = True
    per: ClassVar[Many] = "group"

    @abstractmethod
    def scores(self, samples: Sequence[RewardInput]) -> Sequence[float | None]:
        """See `SupportsBatchScoring.scores`."""
        raise NotImplementedError

    def score(self, sample: RewardInput) -> float | None:
        """The only one of its group."""
        return self.scores([sample])[0]
