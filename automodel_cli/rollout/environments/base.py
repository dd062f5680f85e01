"""What answers the model in a conversation of several messages: a tool, a game, another program. Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from automodel_cli.config.errors import ConfigError
from automodel_cli.rollout.rewards.base import OnError, check_on_error
from automodel_cli.rollout.types import Message


@dataclass(frozen=True)
class Turn:
    """What the environment makes of one model message: messages to go on with, a reward for the turn, the end. `state`
    comes back with the next message."""

    observations: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = True
    state: Any = None


class EnvironmentNode(Protocol):
    """What a node of `rollout.environment` must have; `Environment` has all but `step`. Your own:
    examples/own_environment.py."""

    @property
    @abstractmethod
    def max_turns(self) -> int:
        """Messages of the model after which an episode ends."""
        ...

    @property
    @abstractmethod
    def weight(self) -> float:
        """What the sum of an episode's rewards is multiplied by."""
        ...

    @property
    @abstractmethod
    def on_error(self) -> OnError:
        """What counts when an episode fails."""
        ...

    @property
    @abstractmethod
    def concurrency(self) -> int:
        """How many steps may run at once on a rank."""
        ...

    @property
    @abstractmethod
    def turn_timeout(self) -> float | None:
        """Seconds for one try of a step."""
        ...

    @property
    @abstractmethod
    def episode_timeout(self) -> float | None:
        """Seconds for all steps of an episode together."""
        ...

    @property
    @abstractmethod
    def retries(self) -> int:
        """How often a step that raised, or took too long, is tried again."""
        ...

    @property
    @abstractmethod
    def tools(self) -> Sequence[dict[str, Any]]:
        """What the chat template shows the model of tools, as OpenAI's definitions."""
        ...

    @abstractmethod
    def check(self) -> None:
        """Raise ConfigError for what this machine lacks. Called before the first rollout."""
        ...

    @abstractmethod
    def close(self) -> None:
        """End what the environment has started, if anything. Called at the end of the run."""
        ...

    @abstractmethod
    def step(self, messages: Sequence[Message], row: Mapping[str, Any], state: Any) -> Turn | Awaitable[Turn]:
        """What follows on `messages`, whose last is the model's newest. `row` is the dataset's row, `state` what the
        turn before has left (None at first). Any exception fails the episode. May be `async`; else it runs in a thread
        of its own."""
        ...

    @abstractmethod
    async def ended(self, state: Any) -> float:
        """A last reward for an episode that ends although the environment would have gone on (a message was cut off, or
        there is no turn or no room left); `state` is what its last turn has left."""
        ...


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Answers the model's messages. A subclass defines `step` and keeps nothing itself: what it must remember of a
    conversation is the `state` that a turn hands to the next.

    After `max_turns` messages of the model the episode ends. An episode's environment reward is the sum over its turns;
    it is a sample's reward `environment`, added `weight` times to the others.

    Up to `concurrency` steps run at once on a rank: each in a thread, or, where `step` is an `async def`, in one event
    loop. A try of a step may take `turn_timeout` seconds, and all steps of an episode, with their tries and the pauses
    between these, `episode_timeout` (null: no limit; the model's own time is bounded by `max_turns` x
    `rollout.max_new_tokens`). A thread cannot be ended: one that is given up runs on until it returns.

    A step that raises or takes too long is tried up to `retries` times more, with the same messages and the same state,
    after pauses of 0.5, 1, 2, ... seconds; so it must not have done half of something. Then the episode has failed:
    it ends, and `on_error` says what counts. `skip`: the sample is left out of training and of its group's baseline;
    the fault is not the model's. `zero`: the environment gives 0 and the other rewards count. `fail`: the sample is
    worth 0.
    """

    max_turns: int = 4
    """Maximum number of model messages per episode."""
    weight: float = 1.0
    """Weight of the environment's reward in a sample's reward."""
    on_error: OnError = "skip"
    """Treatment of an episode with a failed step: `zero` reward, `fail` (the sample is worth 0) or `skip` (excluded
    from training)."""
    concurrency: int = 32
    """Maximum number of concurrent steps per rank."""
    turn_timeout: float | None = None
    """Seconds for one attempt of a step. null: no limit."""
    episode_timeout: float | None = None
    """Seconds for all steps of an episode, without the model's time. null: no limit."""
    retries: int = 0
    """Number of retries of a failed step."""

    def __post_init__(self) -> None:
        check_limits(self)

    @property
    def tools(self) -> Sequence[dict[str, Any]]:
        """The template shows none."""
        return ()

    def check(self) -> None:
        """Nothing is lacking."""

    def close(self) -> None:
        """Nothing was started."""

    @abstractmethod
    def step(self, messages: Sequence[Message], row: Mapping[str, Any], state: Any) -> Turn | Awaitable[Turn]:
        """See `EnvironmentNode.step`."""
        raise NotImplementedError

    async def ended(self, state: Any) -> float:
        """Nothing more."""
        return 0.0


def check_limits(node: EnvironmentNode, place: str = "") -> None:
    """Raise ConfigError for numbers that are no limits; `place` is where the node stands in the config."""
    for name, least in (("max_turns", 1), ("concurrency", 1), ("retries", 0)):
        value = getattr(node, name)
        if value < least:
            fix = None if place else f"{name}={least}"  # a class without our base has no such key
            raise ConfigError(
                f"{place}{name}={value} must be at least {least}",
                code="out_of_range",
                keys=(f"{place}{name}",),
                fix=fix,
            )
    for name in ("turn_timeout", "episode_timeout"):
        value = getattr(node, name)
        if value is not None and not value > 0:
            fix = None if place else f"{name}=60"
            raise ConfigError(
                f"{place}{name}={value} s must be above 0", code="out_of_range", keys=(f"{place}{name}",), fix=fix
            )
    check_on_error(node.on_error, f"{place}on_error" if place else None)
