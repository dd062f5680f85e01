"""Multi-turn episodes: the model and an environment (a tool, a game) alternate until one of them is done.

Token in, token out: the tokens of an episode are exactly those that the model read and generated. The chat template
renders replies after the tokens of the model, which are never tokenized again (`token_consistency.py`). Torch-free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.config.warn import warn
from automodel_cli.rollout.engines.base import Engine, sample_seed
from automodel_cli.rollout.environments.base import Turn
from automodel_cli.rollout.environments.event_loop import in_thread
from automodel_cli.rollout.environments.pool import EnvironmentPool, Failure
from automodel_cli.rollout.environments.token_consistency import check_read, tokens_between
from automodel_cli.rollout.routed_experts import first_known
from automodel_cli.rollout.types import Account, Completion, EpisodeEnd, Message, SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase

    from automodel_cli.data.preparation.prompt_dataset import Prompt


@dataclass
class Episode:
    """One conversation.

    - `prompt`: the first tokens, which render `messages`. `row` is for the environment, `tools` for the template.
    - `tokens`: all tokens after the prompt. `generated[i]` is whether the model generated `tokens[i]`. Only these have
      a log-prob (0 elsewhere) and belong in the loss.
    - `response_messages`: the messages after the prompt. `error`: why the episode failed.
    - `rendered`: the text of the template before, between and after the messages of the model.
    - `weight_versions`: the oldest version that sampled each message. `versions`: the version of each token. Other
      tokens have the version of the preceding message.
    - `routed_experts`: as in `Completion`, for all tokens read.
    """

    name: str = ""
    prompt: Sequence[int] = ()
    messages: Sequence[Message] = ()
    row: Mapping[str, object] = field(default_factory=dict)
    seed: int | None = None
    tools: list[dict[str, object]] | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    generated: list[bool] = field(default_factory=list)
    response_messages: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    finish_reason: EpisodeEnd = "stop"
    weight_versions: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    error: str | None = None
    state: object = None
    account: Account = field(default_factory=Account)
    rendered: list[str] = field(default_factory=list)
    routed_experts: np.ndarray | None = None

    def about(self, index: int, prompt: Prompt) -> Episode:
        """This one, as the `index`-th on a prompt."""
        name, messages = sample_name(index, prompt), prompt.messages
        return replace(self, name=name, prompt=prompt.tokens, messages=messages, row=prompt.row, tools=prompt.tools)

    def without_prompt(self) -> Episode:
        """Return it without its prompt and without the state of the environment, which other ranks do not need."""
        return replace(self, prompt=(), messages=(), row={}, tools=None, state=None, rendered=[])

    @property
    def reward(self) -> float:
        """Sum over turns."""
        return sum(self.rewards)

    @property
    def weight_version(self) -> int:
        """Of the oldest weights that drew a token."""
        return min(self.weight_versions)

    @property
    def cut(self) -> bool:
        """Whether the newest message of the model is incomplete."""
        return self.finish_reason == "length"

    @property
    def num_turns(self) -> int:
        """Messages of the model."""
        return len(self.weight_versions)


@dataclass(frozen=True)
class Reply:
    """Reply to a message of the model, for all ranks that run the same episode: the reward, and either messages with
    their tokens (up to the next message of the model), or the end."""

    reward: float = 0.0
    observations: tuple[Message, ...] = ()
    tokens: tuple[int, ...] = ()
    end: EpisodeEnd | None = None
    error: str | None = None


Exchange = Callable[[Callable[[], list[Reply]]], tuple[list[Reply], bool]]
"""Request the replies to the running episodes, in order. Also return whether an episode is still running on any rank.
"""


def single_process_exchange(ask: Callable[[], list[Reply]]) -> tuple[list[Reply], bool]:
    """The `Exchange` of one process."""
    replies = ask()
    return replies, any(reply.end is None for reply in replies)


@dataclass(frozen=True)
# Example of one episode: prompt p0 p1, message m0 m1, a tool's reply r0, message m2. `tokens` = m0 m1 r0 m2,
# `generated` = 1 1 0 1, and the log-prob of r0 is 0. The second call of the engine has the prompt p0 p1 m0 m1 r0. The
# conversation is never rendered again, because a template could render the earlier messages differently.
class EpisodeRunner:
    """Run episodes. `params.max_new_tokens` limits one message.

    An episode continues only if a complete message fits into `seq_len` tokens, including the prompt. Seeds of turns
    are derived from the seed of the episode. Therefore samples do not depend on other episodes or on timing.
    """

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    pool: EnvironmentPool
    params: SamplingParams
    seq_len: int
    chat_template: str | None = None

    def run_lockstep(self, episodes: Sequence[Episode], exchange: Exchange = single_process_exchange) -> None:
        """Run new episodes turn by turn: one `generate` for all of them, then all environments concurrently.

        An engine sees the same batches whichever environment replies first, so a run is reproducible bitwise. If
        `generate` is collective, so is this method. `exchange` broadcasts replies to the ranks that run the same
        episodes. Every rank calls `generate` until no rank has running episodes, without prompts at the end. Raises
        DataError if the chat template does not support several turns.
        """
        running, anyone = list(episodes), True
        turn = 0
        while anyone:
            # The seed of a turn follows from the seed of the episode and the turn alone, so that finished neighbors do
            # not matter.
            seeds = [seed for episode in running if (seed := _seed(episode, turn)) is not None]
            prompts = [[*episode.prompt, *episode.tokens] for episode in running]
            completions = self.engine.generate(prompts, self.params, seeds if seeds or not running else None)
            for episode, prompt, completion in zip(running, prompts, completions, strict=True):
                self._hear(episode, prompt, completion)
            replies, anyone = exchange(partial(self._answered, running))
            for episode, reply in zip(running, replies, strict=True):
                _take_in(episode, reply)
            running = [episode for episode, reply in zip(running, replies, strict=True) if reply.end is None]
            turn += 1

    def run_async(self, episodes: Sequence[Episode], concurrency: int) -> None:
        """Run all episodes at their own pace, up to `concurrency` of them in the engine at once. No episode waits for
        another's turn. `generate` of the engine must be thread-safe."""
        self.pool.run(self._all(episodes, concurrency))

    async def _all(self, episodes: Sequence[Episode], concurrency: int) -> None:
        places = asyncio.Semaphore(concurrency)

        async def played(episode: Episode) -> None:
            turn = 0
            while True:
                prompt, seed = [*episode.prompt, *episode.tokens], _seed(episode, turn)
                seeds = None if seed is None else [seed]
                async with places:
                    (completion,) = await in_thread(partial(self.engine.generate, [prompt], self.params, seeds))
                self._hear(episode, prompt, completion)
                reply = await self._reply(episode)
                _take_in(episode, reply)
                if reply.end is not None:
                    return
                turn += 1

        tasks = [asyncio.ensure_future(played(episode)) for episode in episodes]
        try:
            await asyncio.gather(*tasks)
        finally:  # another thread raised, so the remaining results are not needed
            for task in tasks:
                task.cancel()

    def _hear(self, episode: Episode, prompt: Sequence[int], completion: Completion) -> None:
        """The model's next message."""
        if completion.prompt_tokens is not None:
            check_read(prompt, completion.prompt_tokens, f"{episode.name}, turn {episode.num_turns + 1}")
        _extend(episode, completion.tokens, completion.logprobs, completion.versions, generated=True)
        episode.routed_experts = first_known(episode.routed_experts, completion.routed_experts)
        episode.finish_reason = completion.finish_reason
        episode.weight_versions.append(completion.weight_version)
        text = str(self.tokenizer.decode(completion.tokens, skip_special_tokens=True))
        episode.response_messages.append({"role": "assistant", "content": text})

    def _answered(self, running: Sequence[Episode]) -> list[Reply]:
        async def replies() -> list[Reply]:
            return await asyncio.gather(*map(self._reply, running))

        return self.pool.run(replies())

    async def _reply(self, episode: Episode) -> Reply:
        """Pass the newest message of the model to the environment."""
        environment = self.pool.of(episode.row)
        messages = [*episode.messages, *episode.response_messages]
        try:
            turn = await self.pool.turn(episode.name, messages, episode.row, episode.state, episode.account)
        except DataError as error:
            raise DataError(
                f"{episode.name}, turn {episode.num_turns}: {error.message}",
                code=error.code,
                keys=error.keys,
                fix=error.fix,
            ) from error
        if isinstance(turn, Failure):
            return _failed(episode, turn, environment.on_error)
        if turn.done:
            return Reply(turn.reward, end=episode.finish_reason)
        if episode.cut or episode.num_turns == environment.max_turns:
            return await self._broken_off(episode, turn, "length" if episode.cut else "turns")
        try:
            # Only the tokens between two messages of the model: the end of its turn, the replies, and the start of the
            # next turn.
            tokens = tokens_between(self.tokenizer, self.chat_template, episode, turn.observations)
        except ConfigError:  # an error of the template, not of the rendered message
            raise
        except Exception as error:  # a message that no template renders ends its episode
            return _failed(episode, Failure("error", f"{type(error).__name__}: {error}"), environment.on_error)
        # The next message may have `max_new_tokens`. An episode ends before a message that might not fit.
        if len(episode.prompt) + len(episode.tokens) + len(tokens) > self.seq_len - self.params.max_new_tokens:
            return await self._broken_off(episode, turn, "length")
        episode.state = turn.state
        return Reply(turn.reward, tuple(dict(message) for message in turn.observations), tuple(tokens))

    async def _broken_off(self, episode: Episode, turn: Turn, end: EpisodeEnd) -> Reply:
        """The end of an episode whose environment would have gone on."""
        last = await self.pool.ended(episode.name, episode.row, turn.state, episode.account)
        if isinstance(last, Failure):
            return _failed(episode, last, self.pool.of(episode.row).on_error)
        return Reply(turn.reward + last.reward, end=end)


def sample_name(index: int, prompt: Prompt) -> str:
    """Return the name of the `index`-th sample of a prompt in messages."""
    return f"sample {index} of {prompt.origin}"


def _seed(episode: Episode, turn: int) -> int | None:
    return None if episode.seed is None else sample_seed(episode.seed, turn)


def _failed(episode: Episode, failure: Failure, rule: str) -> Reply:
    warn(
        "environment_failed",
        "environment of %s, turn %d: %s (on_error=%s)",
        episode.name,
        episode.num_turns,
        failure.words,
        rule,
    )
    return Reply(end=failure.end, error=failure.words)


def _take_in(episode: Episode, reply: Reply) -> None:
    episode.rewards.append(reply.reward)
    if reply.end is not None:
        episode.finish_reason, episode.error = reply.end, reply.error
        return
    episode.response_messages += [dict(message) for message in reply.observations]
    count = len(reply.tokens)
    _extend(episode, reply.tokens, [0.0] * count, [episode.weight_versions[-1]] * count, generated=False)


def _extend(
    episode: Episode, tokens: Sequence[int], logprobs: Sequence[float], versions: Sequence[int], *, generated: bool
) -> None:
    episode.tokens += tokens
    episode.logprobs += logprobs
    episode.versions += versions
    episode.generated += [generated] * len(tokens)
