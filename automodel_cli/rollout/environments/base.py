"""Interface of environments, which reply to the model in a conversation: a tool, a game, another program.
Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args

from automodel_cli.config.value_checks import check_choice, check_range
from automodel_cli.rollout.rewards.base import OnError
from automodel_cli.rollout.types import Message


@dataclass(frozen=True)
class Turn:
    """Reply of an environment to one message: the next messages, the reward of the turn, and whether the episode is
    done. `state` is passed to the next step."""

    observations: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = True
    state: object = None


class EnvironmentNode(Protocol):
    """Interface of the `rollout.environment` node. `Environment` implements all but `step`. Custom example:
    examples/own_environment.py."""

    @property
    @abstractmethod
    def max_turns(self) -> int:
        """Messages of the model after which an episode ends."""
        ...

    @property
    @abstractmethod
    def weight(self) -> float:
        """Factor of the sum of an episode's rewards."""
        ...

    @property
    @abstractmethod
    def on_error(self) -> OnError:
        """Score of a failed episode."""
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
    def tools(self) -> Sequence[dict[str, object]]:
        """Tool definitions in OpenAI's format, for the chat template."""
        ...

    @abstractmethod
    def check(self) -> None:
        """Raise ConfigError if this machine lacks a requirement. Called before the first rollout."""
        ...

    @abstractmethod
    def close(self) -> None:
        """Release resources. Called at the end of the run."""
        ...

    @abstractmethod
    def step(self, messages: Sequence[Message], row: Mapping[str, object], state: Any) -> Turn | Awaitable[Turn]:
        """Return the reply to `messages`, which end with the newest message of the model.

        `row` is the row of the dataset. `state` is the state of the previous turn (None at first). An exception fails
        the episode. May be `async`, else it runs in a thread.
        """
        ...

    @abstractmethod
    async def ended(self, state: object) -> float:
        """Return a final reward for an episode that ends early: a message was truncated, or the limit of turns or
        tokens is reached. `state` is the state of the last turn."""
        ...


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Base class of environments. A subclass defines `step` and is stateless.

    Per-episode data belongs into `state`, which a turn passes to the next one.

    - An episode ends after `max_turns` messages of the model. Its reward is the sum over its turns, added `weight`
      times to the other rewards under the name `environment`.
    - Up to `concurrency` steps run concurrently on a rank: in threads, or in one event loop if `step` is `async`.
    - `turn_timeout` limits one attempt of a step. `episode_timeout` limits all steps of an episode, including retries
      and pauses. null: no limit. Generation time is not included. A thread cannot be killed: it runs until it returns.
    - A failed step is repeated up to `retries` times with the same messages and state, after 0.5, 1, 2, ... seconds.
      Therefore it must have no partial effects.
    - If all attempts fail, `on_error` decides. `skip`: the sample is excluded from training and from the baseline of
      its group. `zero`: the environment's reward is 0. `fail`: the sample is worth 0.
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
    def tools(self) -> Sequence[dict[str, object]]:
        """The template shows none."""
        return ()

    def check(self) -> None:
        """Requires nothing."""

    def close(self) -> None:
        """Has no resources to close."""

    @abstractmethod
    def step(self, messages: Sequence[Message], row: Mapping[str, object], state: Any) -> Turn | Awaitable[Turn]:
        """See `EnvironmentNode.step`."""
        raise NotImplementedError

    async def ended(self, state: object) -> float:
        """Adds nothing."""
        return 0.0


def check_limits(node: EnvironmentNode, place: str = "") -> None:
    """Raise ConfigError for invalid limits. `place` is the key of the node with a dot."""
    for name, least in (("max_turns", 1), ("concurrency", 1), ("retries", 0)):
        fix = None if place else f"{name}={least}"  # a class without our base has no such key
        check_range(f"{place}{name}", getattr(node, name), at_least=least, fix=fix)
    for name in ("turn_timeout", "episode_timeout"):
        fix = None if place else f"{name}=60"
        check_range(f"{place}{name}", getattr(node, name), above=0, unit="s", fix=fix)
    fix = None if place else "on_error=zero"
    check_choice(f"{place}on_error", node.on_error, get_args(OnError), fix=fix)
