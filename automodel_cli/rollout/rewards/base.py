"""What a reward is: a config node that gives one judged sample a number. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from automodel_cli.config.errors import ConfigError

OnError = Literal["zero", "fail", "skip"]
_ON_ERROR = ("zero", "fail", "skip")


@dataclass(frozen=True)
class Judged:
    """One completion in front of the rewards.

    `completion` is its text without special tokens, `num_tokens` what was generated, `finished` whether it ended by
    itself. `row` is the dataset's row (`answer`, `entry`, tests, ...) and `messages` the conversation before the
    completion. `name` says which sample it is in messages to the user.
    """

    name: str
    completion: str
    row: dict[str, Any]
    messages: list[dict[str, Any]] = field(default_factory=list)
    num_tokens: int = 0
    finished: bool = True

    def column(self, name: str) -> Any:
        """A column of the row; KeyError says what there is."""
        if name not in self.row:
            raise KeyError(f"the row has no column {name!r}: it has {', '.join(sorted(self.row)) or 'none'}")
        return self.row[name]


@dataclass(frozen=True, kw_only=True)
class Reward:
    """One reward. A subclass defines `score`; what it returns is multiplied by `weight` and summed with the others.

    `on_error` says what counts when `score` raises, runs out of time or gives no finite number: `zero` counts 0 for
    this reward, `fail` makes the whole sample worth 0, `skip` leaves the sample out of training. `timeout` in seconds:
    the score is computed in a helper process that is killed when it takes longer; None computes it right here, for code
    that cannot hang.
    """

    limits_itself: ClassVar[bool] = False
    """Whether `score` keeps to `timeout` by itself, so that no helper process is needed."""

    confined: ClassVar[bool] = False
    """Whether the helper process, which may evaluate what the completion says, gives up writing files, sockets and
    processes first."""

    weight: float = 1.0
    on_error: OnError = "zero"
    timeout: float | None = None

    def __post_init__(self) -> None:
        if self.on_error not in _ON_ERROR:
            raise ConfigError(
                f"on_error={self.on_error!r} must be one of {', '.join(_ON_ERROR)}",
                keys=("on_error",),
                fix="on_error=zero",
            )
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(f"timeout={self.timeout} s must be above 0", keys=("timeout",), fix="timeout=5")

    def check(self) -> None:
        """Raise ConfigError for what this machine lacks (an extra, isolation). Called before the first rollout."""

    def warm_up(self) -> None:
        """Import what is slow to import. Called in the helper process, and counts against no timeout."""

    def score(self, sample: Judged) -> float:
        """What the sample is worth before the weight; any exception counts as `on_error` says."""
        raise NotImplementedError
