"""Convert engine output to samples with rewards: single responses, and episodes with an environment."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

import torch.distributed as dist

from automodel_cli.data.chat.chat_template import resolve_chat_template
from automodel_cli.rollout.collection.async_queue import Draw, SampleRequest
from automodel_cli.rollout.config_checks import ENVIRONMENT
from automodel_cli.rollout.engines.base import Engine
from automodel_cli.rollout.engines.policy_engine import RankZeroEngine, Start, at_once
from automodel_cli.rollout.environments.base import EnvironmentNode
from automodel_cli.rollout.environments.episode import Episode, EpisodeRunner, Reply, sample_name
from automodel_cli.rollout.environments.pool import EnvironmentPool
from automodel_cli.rollout.environments.token_consistency import check_read
from automodel_cli.rollout.rewards.aggregate import RewardSum
from automodel_cli.rollout.rewards.base import RewardInput
from automodel_cli.rollout.types import Completion, Sample, SamplingParams, Score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from automodel_cli.data.config import DataConfig
    from automodel_cli.distributed.mesh import Mesh
    from automodel_cli.rollout.config import RolloutConfig
    from automodel_cli.rollout.run_context import RunContext
    from automodel_cli.run.trainer import Trainer


def is_model_parallel_rank_zero(mesh: Mesh) -> bool:
    """Return whether this rank is the first of its pipeline-, context- and tensor-parallel group. The ranks of a group
    share prompts and use the results of this rank."""
    return all(axis.get_local_rank() == 0 for axis in (mesh.pp, mesh.cp, mesh.tp))


def play_episodes(
    session: RunContext,
    pool: EnvironmentPool,
    engine: Engine,
    requests: Sequence[SampleRequest],
    params: SamplingParams,
    seeds: Sequence[int] | None,
) -> list[Episode]:
    """Run episodes on the prompts of this rank. Collective over all ranks, which run each turn together. If the engine
    answers several calls concurrently, each episode proceeds independently."""
    player, episodes = _player(session, pool, engine, params), _new(requests, seeds)
    if isinstance(engine, RankZeroEngine) and engine.at_once() > 1:
        local_episodes = episodes if is_model_parallel_rank_zero(session.mesh) else []
        return _begun_on_first_rank(player, engine, local_episodes, at_once)()
    player.run_lockstep(episodes, lambda ask: exchange_replies(session.mesh, ask))
    return episodes


def background_episodes(session: Trainer, pool: EnvironmentPool, engine: Engine) -> Draw:
    """Return a function that runs episodes while the main thread trains. A thread must not wait for other ranks.
    Therefore only model-parallel rank 0 runs the episodes, and the other ranks of its group get none."""

    def begin(
        requests: list[SampleRequest], params: SamplingParams, seeds: Sequence[int], start: Start
    ) -> Callable[[], list[Episode]]:
        player = _player(session, pool, engine, params)
        local_episodes = _new(requests, seeds) if is_model_parallel_rank_zero(session.mesh) else []
        if isinstance(engine, RankZeroEngine):
            return _begun_on_first_rank(player, engine, local_episodes, start)

        def play() -> list[Episode]:
            player.run_lockstep(local_episodes)
            return local_episodes

        return start(play)

    return begin


def environment_fingerprint(data: DataConfig, config: RolloutConfig) -> dict[str, str]:
    """Return a digest of the settings that determine an episode, apart from sampling. Stored in checkpoints, so that a
    resume with other settings does not reuse episodes."""
    # `repr` of frozen dataclasses lists all their values. Only the digest is stored, because they may contain secrets.
    decides = (config.played, config.environment_column, data.seq_len, data.chat_template)
    return {"episodes": hashlib.sha256(repr(decides).encode()).hexdigest()}


def _player(session: RunContext, pool: EnvironmentPool, engine: Engine, params: SamplingParams) -> EpisodeRunner:
    data, tokenizer = session.recipe.data, session.tokenizer
    template = resolve_chat_template(data.chat_template, tokenizer)
    return EpisodeRunner(engine, tokenizer, pool, params, data.seq_len, template)


def _new(requests: Sequence[SampleRequest], seeds: Sequence[int] | None) -> list[Episode]:
    of_sample = [None] * len(requests) if seeds is None else seeds
    pairs = zip(requests, of_sample, strict=True)
    return [Episode(seed=seed).about(index, prompt) for (_, index, prompt), seed in pairs]


def _begun_on_first_rank(
    player: EpisodeRunner, engine: RankZeroEngine, mine: list[Episode], start: Start
) -> Callable[[], list[Episode]]:
    """Start the episodes of all ranks in the process that talks to the engine. The environments run in that process
    too."""

    def play(inner: Engine, episodes: list[Episode]) -> None:
        player_here, version = dataclasses.replace(player, engine=inner), engine.weight_version
        if engine.at_once() > 1:
            player_here.run_async(episodes, engine.at_once())
        else:
            player_here.run_lockstep(episodes)
        for episode in episodes:
            episode.state = None
            if not engine.capabilities.in_flight_updates:
                episode.weight_versions = [version] * episode.num_turns
                episode.versions = [version] * len(episode.tokens)

    def counted(episodes: list[Episode], behind: int) -> None:
        for episode in episodes if engine.capabilities.in_flight_updates else ():
            # Versions of a server count its own updates. `behind` converts them to steps of the trainer.
            episode.weight_versions = [version + behind for version in episode.weight_versions]
            episode.versions = [version + behind for version in episode.versions]

    return engine.begin_for_all(mine, play, start, counted)


def exchange_replies(mesh: Mesh, ask: Callable[[], list[Reply]]) -> tuple[list[Reply], bool]:
    """Run the environment on model-parallel rank 0 and broadcast its replies. A tool is called once, and
    nondeterministic replies cannot make ranks diverge. Collective over all ranks."""
    local = (mesh.dp_rank, ask()) if is_model_parallel_rank_zero(mesh) else None
    everywhere: list[tuple[int, list[Reply]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, local)
    # Key: data-parallel rank. The tp, cp and pp ranks of one dp rank get the same replies.
    merged = dict(pair for pair in everywhere if pair is not None)
    anyone = any(reply.end is None for replies in merged.values() for reply in replies)
    return merged[mesh.dp_rank], anyone


def scored_samples(
    requests: Sequence[SampleRequest],
    answers: Sequence[Completion | Episode],
    tokenizer: PreTrainedTokenizerBase,
    rewards: RewardSum,
    pool: EnvironmentPool | None,
) -> list[Sample]:
    """Return the answers as samples, scored by the rewards and by their environments. Rewards score the last message
    of the model and get the preceding messages as the conversation."""
    unscored = unscored_samples(requests, answers, tokenizer)
    judged = [
        RewardInput(
            name=sample_name(sample.index, sample.prompt),
            completion=sample.text,
            row=sample.prompt.row,
            messages=[*sample.prompt.messages, *sample.response_messages[:-1]],
            num_tokens=sample.num_generated,
            finished=sample.finish_reason == "stop",
            group=sample.place,
        )
        for sample in unscored
    ]
    samples = [dataclasses.replace(s, score=score) for s, score in zip(unscored, rewards(judged), strict=True)]
    if pool is None:
        return samples
    failing = {name for name, reward in rewards.rewards.items() if reward.on_error == "fail"}
    played = [answer for answer in answers if isinstance(answer, Episode)]
    return [_played(sample, episode, pool, failing) for sample, episode in zip(samples, played, strict=True)]


def _played(sample: Sample, episode: Episode, pool: EnvironmentPool, failing: AbstractSet[str]) -> Sample:
    score = with_environment(sample.score, pool.of(episode.row), episode, failing)
    return dataclasses.replace(sample, score=score, environment=pool.name_of(episode.row), account=episode.account)


def unscored_samples(
    requests: Sequence[SampleRequest], answers: Sequence[Completion | Episode], tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    """Return the answers as samples with reward 0."""
    return [_unscored(request, answer, tokenizer) for request, answer in zip(requests, answers, strict=True)]


def with_environment(
    score: Score, environment: EnvironmentNode, episode: Episode, failing: AbstractSet[str] = frozenset()
) -> Score:
    """Add the reward of the environment to the score of the rewards. If one of the `failing` rewards raised an error,
    the sample is worth 0 and the environment adds nothing."""
    if episode.error is None:
        added = 0.0 if failing & set(score.errors) else environment.weight * episode.reward
        total = score.total + added
        return dataclasses.replace(score, total=total, parts={**score.parts, ENVIRONMENT: episode.reward})
    return dataclasses.replace(
        score,
        total=0.0 if environment.on_error == "fail" else score.total,
        errors={**score.errors, ENVIRONMENT: episode.error},
        valid=score.valid and environment.on_error != "skip",
    )


def _unscored(request: SampleRequest, answer: Completion | Episode, tokenizer: PreTrainedTokenizerBase) -> Sample:
    place, index, prompt = request
    nothing = Score(0.0, {}, {})
    if isinstance(answer, Completion):
        if answer.prompt_tokens is not None:
            check_read(prompt.tokens, answer.prompt_tokens, sample_name(index, prompt))
        text = str(tokenizer.decode(answer.tokens, skip_special_tokens=True))
        fields = (answer.tokens, answer.logprobs, text, answer.finish_reason, answer.weight_version)
        return Sample(
            place,
            index,
            prompt,
            *fields,
            nothing,
            token_versions=answer.token_versions,
            routed_experts=answer.routed_experts,
        )
    text = str(answer.response_messages[-1]["content"])
    sample = (answer.tokens, answer.logprobs, text, answer.finish_reason, answer.weight_version, nothing)
    return Sample(
        place,
        index,
        prompt,
        *sample,
        answer.generated,
        answer.response_messages,
        token_versions=answer.versions,
        routed_experts=answer.routed_experts,
    )
