"""From what an engine drew to samples with rewards: single responses, and episodes with an environment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from automodel_cli.data.prompts import Prompt
from automodel_cli.data.template_choice import resolve_chat_template
from automodel_cli.rollout.conversation import Episode, Player, Reply
from automodel_cli.rollout.engine import Completion, Engine, SamplingParams
from automodel_cli.rollout.environment import EnvironmentNode
from automodel_cli.rollout.environment_pool import EnvironmentPool
from automodel_cli.rollout.experience import Sample
from automodel_cli.rollout.model_engines import RankZeroEngine
from automodel_cli.rollout.rewards.base import Judged
from automodel_cli.rollout.rewards.combine import RewardSum, Score
from automodel_cli.rollout.rules import ENVIRONMENT
from automodel_cli.rollout.sample_queue import SampleRequest
from automodel_cli.rollout.token_turns import check_read

if TYPE_CHECKING:
    from automodel_cli.distributed.mesh import Mesh
    from automodel_cli.run.session import Session


def is_group_leader(mesh: Mesh) -> bool:
    """Whether this rank is the first of its pipeline, context- and tensor-parallel group. The ranks of such a group
    share prompts, and all of them use what their leader found."""
    return all(axis.get_local_rank() == 0 for axis in (mesh.pp, mesh.cp, mesh.tp))


def play_episodes(
    session: Session,
    pool: EnvironmentPool,
    engine: Engine,
    requests: Sequence[SampleRequest],
    params: SamplingParams,
    seeds: Sequence[int] | None,
) -> list[Episode]:
    """Episodes on the prompts of this rank. Collective over all ranks, which take every turn together; an engine that
    answers several calls at once is not waited for, so that each episode goes on at its own pace."""
    data, tokenizer = session.recipe.data, session.tokenizer
    of_sample = [None] * len(requests) if seeds is None else seeds
    episodes = [
        Episode(_name(index, prompt), prompt.tokens, prompt.messages, prompt.row, seed, prompt.tools)
        for (_, index, prompt), seed in zip(requests, of_sample, strict=True)
    ]
    template = resolve_chat_template(data.chat_template, tokenizer)
    player = Player(engine, tokenizer, pool, params, data.seq_len, template)
    if isinstance(engine, RankZeroEngine) and engine.at_once() > 1:
        mine = episodes if is_group_leader(session.mesh) else []
        return _played_on_first_rank(player, engine, mine)
    player.together(episodes, lambda ask: exchange_replies(session.mesh, ask))
    return episodes


def _played_on_first_rank(player: Player, engine: RankZeroEngine, mine: list[Episode]) -> list[Episode]:
    """Episodes of all ranks, each at its own pace, by the process that speaks to the engine; the environments run there
    too."""

    def play(inner: Engine, episodes: list[Episode]) -> None:
        dataclasses.replace(player, engine=inner).freely(episodes, engine.at_once())
        for episode in episodes:
            episode.state = None
            episode.weight_versions = [engine.weight_version] * episode.num_turns

    return engine.for_all(mine, play)


def exchange_replies(mesh: Mesh, ask: Callable[[], list[Reply]]) -> tuple[list[Reply], bool]:
    """One of the ranks that share prompts asks the environment, and the others take its word: a tool is called once,
    and answers that differ cannot tear them apart. Collective over all ranks."""
    mine = (mesh.dp_rank, ask()) if is_group_leader(mesh) else None
    everywhere: list[tuple[int, list[Reply]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    found = dict(pair for pair in everywhere if pair is not None)
    anyone = any(reply.end is None for replies in found.values() for reply in replies)
    return found[mesh.dp_rank], anyone


def scored_samples(
    requests: Sequence[SampleRequest],
    answers: Sequence[Completion | Episode],
    tokenizer: Any,
    rewards: RewardSum,
    pool: EnvironmentPool | None,
) -> list[Sample]:
    """The answers as samples, judged by the rewards and, if there are some, by their environments. The rewards read the
    model's last message, with all before it as the conversation."""
    unscored = unscored_samples(requests, answers, tokenizer)
    judged = [
        Judged(
            name=_name(sample.index, sample.prompt),
            completion=sample.text,
            row=sample.prompt.row,
            messages=[*sample.prompt.messages, *sample.said[:-1]],
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
    requests: Sequence[SampleRequest], answers: Sequence[Completion | Episode], tokenizer: Any
) -> list[Sample]:
    """The answers as samples that are worth 0."""
    return [_unscored(request, answer, tokenizer) for request, answer in zip(requests, answers, strict=True)]


def with_environment(
    score: Score, environment: EnvironmentNode, episode: Episode, failing: AbstractSet[str] = frozenset()
) -> Score:
    """Add what the episode's environment gave to the score of the rewards. A sample is worth 0 after an error of one of
    the `failing` rewards, and the environment adds nothing to it."""
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


def _unscored(request: SampleRequest, answer: Completion | Episode, tokenizer: Any) -> Sample:
    place, index, prompt = request
    nothing = Score(0.0, {}, {})
    if isinstance(answer, Completion):
        if answer.prompt_tokens is not None:
            check_read(prompt.tokens, answer.prompt_tokens, _name(index, prompt))
        text = str(tokenizer.decode(answer.tokens, skip_special_tokens=True))
        drawn = (answer.tokens, answer.logprobs, text, answer.finish_reason, answer.weight_version)
        return Sample(place, index, prompt, *drawn, nothing, token_versions=answer.token_versions)
    text = str(answer.said[-1]["content"])
    drawn_by = min(answer.weight_versions)
    sample = (answer.tokens, answer.logprobs, text, answer.finish_reason, drawn_by, nothing)
    return Sample(place, index, prompt, *sample, answer.generated, answer.said)


def _name(index: int, prompt: Prompt) -> str:
    return f"sample {index} of {prompt.origin}"
