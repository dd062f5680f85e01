"""Multi-turn episodes: the model speaks, an environment (a tool, a game) answers, until one of them is done.

Token in, token out: an episode's tokens are those the model read and wrote. What the environment says is rendered by
the chat template behind the model's own tokens, which are never tokenised again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from automodel_cli.config.errors import DataError
from automodel_cli.rollout.engine import Engine, FinishReason, SamplingParams, sample_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
_PLACE = "\N{INVISIBLE SEPARATOR}reply\N{INVISIBLE SEPARATOR}"  # stands for the model's text in a rendered conversation


@dataclass(frozen=True)
class Turn:
    """What the environment makes of one model message: messages to go on with, a reward for the turn, the end."""

    observations: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = True
    metadata: Any = None


class Environment(Protocol):
    """Sees conversations that end in the model's newest message. Keeps no state of its own: `metadata` carries it."""

    def step(self, conversations: Sequence[Sequence[Message]], metadata: Sequence[Any]) -> Sequence[Turn]:
        """One turn for each conversation still running, in order; the metadata it returns comes back next time."""


@dataclass
class Episode:
    """One conversation played to its end. `tokens` are all after the prompt; `generated[i]` says whether the model drew
    `tokens[i]`: only those have a log-prob (0 elsewhere) and belong in the loss."""

    prompt: list[int]
    messages: list[Message]
    metadata: Any = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    generated: list[bool] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    finish_reason: FinishReason = "stop"
    weight_versions: list[int] = field(default_factory=list)

    @property
    def reward(self) -> float:
        """Sum over turns."""
        return sum(self.rewards)


def play(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    environment: Environment,
    conversations: Sequence[Sequence[Message]],
    metadata: Sequence[Any],
    params: SamplingParams,
    *,
    max_turns: int = 8,
    max_tokens: int = 4096,
    seeds: Sequence[int] | None = None,
) -> list[Episode]:
    """Play all conversations turn by turn, together.

    `params.max_new_tokens` bounds one message, `max_tokens` an episode behind its prompt. An episode that is cut off by
    either, or by `max_turns`, has finish_reason "length". `seeds`: one for each conversation, from which each turn
    derives its own.
    Raises DataError where the chat template does not render what follows a message behind it.
    """
    episodes = [
        Episode(_render(tokenizer, messages), [dict(m) for m in messages], data)
        for messages, data in zip(conversations, metadata, strict=True)
    ]
    running = list(range(len(episodes)))
    for turn in range(max_turns):
        if not running:
            break
        prompts = [episodes[i].prompt + episodes[i].tokens for i in running]
        of_turn = None if seeds is None else [sample_seed(seeds[i], turn) for i in running]
        for i, completion in zip(running, engine.generate(prompts, params, of_turn), strict=True):
            episode = episodes[i]
            _extend(episode, completion.tokens, completion.logprobs, generated=True)
            episode.finish_reason = completion.finish_reason
            episode.weight_versions.append(completion.weight_version)
            said = str(tokenizer.decode(completion.tokens, skip_special_tokens=True))
            episode.messages.append({"role": "assistant", "content": said})
        turns = environment.step([episodes[i].messages for i in running], [episodes[i].metadata for i in running])
        still = []
        for i, outcome in zip(running, turns, strict=True):
            if _continues(tokenizer, episodes[i], outcome, max_tokens, last=turn == max_turns - 1):
                still.append(i)
        running = still
    return episodes


def _continues(
    tokenizer: PreTrainedTokenizerBase, episode: Episode, turn: Turn, max_tokens: int, *, last: bool
) -> bool:
    """Take in what the environment said; whether the model speaks again."""
    episode.rewards.append(turn.reward)
    episode.metadata = turn.metadata
    if turn.done or episode.finish_reason == "length":
        return False
    added = _tokens_between(tokenizer, episode, turn.observations)
    if last or len(episode.tokens) + len(added) >= max_tokens:
        episode.finish_reason = "length"
        return False
    episode.messages += [dict(message) for message in turn.observations]
    _extend(episode, added, [0.0] * len(added), generated=False)
    return True


def _extend(episode: Episode, tokens: list[int], logprobs: list[float], *, generated: bool) -> None:
    episode.tokens += tokens
    episode.logprobs += logprobs
    episode.generated += [generated] * len(tokens)


def _render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    encoded: Any = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def _tokens_between(tokenizer: PreTrainedTokenizerBase, episode: Episode, observations: Sequence[Message]) -> list[int]:
    """What stands between the model's last token and its next: the end of its turn, as far as it has not drawn that
    itself, the observations, the header of its next message."""
    messages = [*episode.messages[:-1], {"role": "assistant", "content": _PLACE}, *observations]
    text = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    before, _, after = text.partition(_PLACE)
    if not before or not after or _PLACE in after:
        raise DataError(
            "the chat template does not render an assistant message once, with what follows behind it: this tokenizer "
            "cannot play several turns",
            keys=("model.tokenizer",),
        )
    stop = str(tokenizer.decode(episode.tokens[-1:]))
    if episode.finish_reason == "stop" and after.startswith(stop):
        after = after.removeprefix(stop)
    return list(tokenizer(after, add_special_tokens=False)["input_ids"])
