"""Multi-turn episodes: the model speaks, an environment (a tool, a game) answers, until one of them is done.

Token in, token out: an episode's tokens are those the model read and wrote. What the environment says is rendered by
the chat template behind the model's own tokens, which are never tokenised again. Torch-free.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.rollout.engine import Engine, SamplingParams, sample_seed
from automodel_cli.rollout.rewards.base import OnError, check_on_error

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Message = dict[str, Any]
EpisodeEnd = Literal["stop", "length", "turns", "error"]
"""`stop`: the environment is done. `length`: a message was cut off, or the row has no room for another. `turns`: the
environment would have gone on after the last turn. `error`: the environment raised."""

_PLACE = "\N{INVISIBLE SEPARATOR}reply\N{INVISIBLE SEPARATOR}"  # stands for the model's text in a rendered conversation


@dataclass(frozen=True)
class Turn:
    """What the environment makes of one model message: messages to go on with, a reward for the turn, the end. `state`
    comes back with the next message."""

    observations: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = True
    state: Any = None


class EnvironmentNode(Protocol):
    """What the node of `rollout.environment` must have; `Environment` has all but `step`. Your own:
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
        """What counts when `step` raises."""
        ...

    @abstractmethod
    def step(self, messages: Sequence[Message], row: Mapping[str, Any], state: Any) -> Turn:
        """What follows on `messages`, whose last is the model's newest. `row` is the dataset's row, `state` what the
        turn before has left (None at first). Any exception counts as `on_error` says."""
        ...


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Answers the model's messages. A subclass defines `step` and keeps nothing itself: what it must remember of a
    conversation is the `state` that a turn hands to the next.

    After `max_turns` messages of the model the episode ends. An episode's environment reward is the sum over its turns;
    it is a sample's reward `environment`, added `weight` times to the others. `on_error` says what counts when `step`
    raises: `zero` counts 0 for it, `fail` makes the whole sample worth 0, `skip` leaves the sample out of training. The
    episode ends there in any case.
    """

    max_turns: int = 4
    weight: float = 1.0
    on_error: OnError = "zero"

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ConfigError(f"max_turns={self.max_turns} must be at least 1", keys=("max_turns",), fix="max_turns=4")
        check_on_error(self.on_error)

    @abstractmethod
    def step(self, messages: Sequence[Message], row: Mapping[str, Any], state: Any) -> Turn:
        """See `EnvironmentNode.step`."""
        raise NotImplementedError


@dataclass
class Episode:
    """One conversation played to its end.

    `prompt` are its first tokens and `messages` what they say; `row` is for the environment. `tokens` are all after the
    prompt; `generated[i]` says whether the model drew `tokens[i]`: only those have a log-prob (0 elsewhere) and belong
    in the loss. `said` are the messages after the prompt. `error` is what the environment raised.
    """

    name: str
    prompt: Sequence[int]
    messages: Sequence[Message]
    row: Mapping[str, Any]
    seed: int | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    generated: list[bool] = field(default_factory=list)
    said: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    finish_reason: EpisodeEnd = "stop"
    weight_versions: list[int] = field(default_factory=list)
    error: str | None = None
    state: Any = None

    @property
    def reward(self) -> float:
        """Sum over turns."""
        return sum(self.rewards)

    @property
    def cut(self) -> bool:
        """Whether the newest message of the model is incomplete."""
        return self.finish_reason == "length"


@dataclass(frozen=True)
class Reply:
    """What follows a message of the model, for every rank that plays the same episode: the reward, and either the
    messages with their tokens, up to where the model speaks again, or the end."""

    reward: float = 0.0
    observations: tuple[Message, ...] = ()
    tokens: tuple[int, ...] = ()
    end: EpisodeEnd | None = None
    error: str | None = None


Exchange = Callable[[Callable[[], list[Reply]]], tuple[list[Reply], bool]]
"""Asks for the replies to the episodes still running here, in order; whether an episode goes on on any rank."""


def alone(ask: Callable[[], list[Reply]]) -> tuple[list[Reply], bool]:
    """The `Exchange` of one process."""
    replies = ask()
    return replies, any(reply.end is None for reply in replies)


def play(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    environment: EnvironmentNode,
    episodes: Sequence[Episode],
    params: SamplingParams,
    *,
    seq_len: int,
    chat_template: str | None = None,
    exchange: Exchange = alone,
) -> None:
    """Play all episodes, which must be new, turn by turn, together.

    `params.max_new_tokens` bounds one message. An episode goes on only where a whole message has room in `seq_len`
    tokens, prompt included. The seed of a turn is derived from the episode's. Where `generate` is collective, so is
    this: `exchange` carries one rank's replies to all that play the same episodes, and every rank calls `generate`
    until no rank plays any more, in the end without prompts.
    Raises DataError where the chat template does not render what follows a message behind it.
    """
    running, anyone = list(episodes), True
    room = seq_len - params.max_new_tokens
    turn = 0
    while anyone:
        _speak(engine, tokenizer, running, params, turn)
        last = turn == environment.max_turns - 1

        def ask(running: list[Episode] = running, last: bool = last) -> list[Reply]:
            return [_reply(environment, tokenizer, chat_template, episode, room, last=last) for episode in running]

        replies, anyone = exchange(ask)
        for episode, reply in zip(running, replies, strict=True):
            _take_in(episode, reply)
        running = [episode for episode, reply in zip(running, replies, strict=True) if reply.end is None]
        turn += 1


def _speak(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, running: Sequence[Episode], params: SamplingParams, turn: int
) -> None:
    """The model's next message in every episode."""
    seeds = [sample_seed(episode.seed, turn) for episode in running if episode.seed is not None]
    prompts = [[*episode.prompt, *episode.tokens] for episode in running]
    completions = engine.generate(prompts, params, seeds if seeds or not running else None)
    for episode, completion in zip(running, completions, strict=True):
        _extend(episode, completion.tokens, completion.logprobs, generated=True)
        episode.finish_reason = completion.finish_reason
        episode.weight_versions.append(completion.weight_version)
        text = str(tokenizer.decode(completion.tokens, skip_special_tokens=True))
        episode.said.append({"role": "assistant", "content": text})


def _reply(
    environment: EnvironmentNode,
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
    episode: Episode,
    room: int,
    *,
    last: bool,
) -> Reply:
    """What the environment makes of the model's newest message."""
    try:
        turn = environment.step([*episode.messages, *episode.said], episode.row, episode.state)
        if not math.isfinite(turn.reward):
            raise ValueError(f"gave the reward {turn.reward}, which is no finite number")
        if turn.done or episode.cut:
            return Reply(turn.reward, end=episode.finish_reason)
        if last:
            return Reply(turn.reward, end="turns")
        tokens = _tokens_between(tokenizer, chat_template, episode, turn.observations)
    except DataError:
        raise
    except Exception as error:  # whatever an environment raises, or says that no template renders, ends its episode
        words = f"{type(error).__name__}: {error}"
        rule = environment.on_error
        logger.warning("environment of %s, turn %d: %s (on_error=%s)", episode.name, _turns(episode), words, rule)
        return Reply(end="error", error=words)
    if len(episode.prompt) + len(episode.tokens) + len(tokens) > room:
        return Reply(turn.reward, end="length")
    episode.state = turn.state
    return Reply(turn.reward, tuple(dict(message) for message in turn.observations), tuple(tokens))


def _turns(episode: Episode) -> int:
    return sum(message["role"] == "assistant" for message in episode.said)


def _take_in(episode: Episode, reply: Reply) -> None:
    episode.rewards.append(reply.reward)
    if reply.end is not None:
        episode.finish_reason, episode.error = reply.end, reply.error
        return
    episode.said += [dict(message) for message in reply.observations]
    _extend(episode, reply.tokens, [0.0] * len(reply.tokens), generated=False)


def _extend(episode: Episode, tokens: Sequence[int], logprobs: Sequence[float], *, generated: bool) -> None:
    episode.tokens += tokens
    episode.logprobs += logprobs
    episode.generated += [generated] * len(tokens)


def _tokens_between(
    tokenizer: PreTrainedTokenizerBase,
    chat_template: str | None,
    episode: Episode,
    observations: Sequence[Message],
) -> list[int]:
    """What stands between the model's last token and its next: the end of its turn, as far as it has not drawn that
    itself, the observations, the header of its next message."""
    placed = {"role": "assistant", "content": _PLACE}
    messages = [*episode.messages, *episode.said[:-1], placed, *observations]
    text = str(
        tokenizer.apply_chat_template(messages, chat_template=chat_template, add_generation_prompt=True, tokenize=False)
    )
    before, _, after = text.partition(_PLACE)
    if not before or not after or _PLACE in after:
        raise DataError(
            "the chat template does not render an assistant message once, with what follows behind it: this tokenizer "
            "cannot play several turns",
            keys=("model.tokenizer",),
        )
    stop = str(tokenizer.decode(episode.tokens[-1:]))
    if after.startswith(stop):
        after = after.removeprefix(stop)
    return list(tokenizer(after, add_special_tokens=False)["input_ids"])
