"""Generation tasks: sample responses and score them with rewards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.data.preparation.prompt_dataset import Prompt
from automodel_cli.data.preparation.prompt_reader import no_tools
from automodel_cli.data.preparation.prompts import prepare_prompts
from automodel_cli.evaluation.picture_questions import answers_with_pictures
from automodel_cli.evaluation.scores import REWARD, TaskScores, pass_at_k
from automodel_cli.evaluation.settings import GenerationSettings, refuse_samples
from automodel_cli.rollout.collection.multi_turn import play_episodes, scored_samples
from automodel_cli.rollout.engines.base import sample_seed
from automodel_cli.rollout.environments.episode import Episode
from automodel_cli.rollout.rewards.aggregate import RewardSum
from automodel_cli.rollout.rewards.row_checks import check_reward_rows
from automodel_cli.rollout.types import Completion, SamplingParams
from automodel_cli.run.checks.token_ids import check_tokens
from automodel_cli.run.picture_data import picture_rows

if TYPE_CHECKING:
    from automodel_cli.evaluation.eval_model import EvalModel

_SHOWN = 4
"""Responses to a question that the results keep."""


def ask(task: GenerationSettings, candidate: EvalModel) -> TaskScores:
    """Return `pass@k` (`accuracy` for one response) and the mean `reward` of each question. Collective.

    If a run has environments, its questions start conversations, and rewards score the last message. A question with a
    response that was skipped after an error (`on_error: skip`) is excluded from all measures.
    """
    prompts = read_questions(task, candidate)
    places = [(number, index) for number in candidate.share(len(prompts)) for index in range(task.num_samples)]
    requests = [(number, index, prompts[number]) for number, index in places]
    params = SamplingParams(max_new_tokens=task.max_new_tokens, temperature=task.temperature, top_p=task.top_p)
    seeds = [sample_seed(task.seed, number, index) for number, index in places]
    answers: Sequence[Completion | Episode]
    pool = candidate.pool if task.data is None else None
    if candidate.pictures is not None:
        answers = answers_with_pictures(candidate, [prompt for _, _, prompt in requests], task.max_new_tokens)
    elif pool is None:
        answers = candidate.sampler.generate([prompt.tokens for _, _, prompt in requests], params, seeds)
    else:
        answers = play_episodes(candidate, pool, candidate.sampler, requests, params, seeds)
    with RewardSum(task.rewards) as rewards:
        samples = scored_samples(requests, answers, candidate.tokenizer, rewards, None)
    local: dict[int, list[tuple[str, float | None]]] = {}
    for sample in samples:
        local.setdefault(sample.place, []).append((sample.text, sample.score.total if sample.score.valid else None))
    found = candidate.gathered(local)
    totals = [_complete([total for _, total in judged]) for judged in found]
    right = [None if of is None else sum(total >= task.threshold for total in of) for of in totals]
    measures = {
        _name(k, task): [None if count is None else pass_at_k(task.num_samples, count, k) for count in right]
        for k in task.pass_at
    }
    measures[REWARD] = [None if of is None else sum(of) / len(of) for of in totals]
    items = [
        {
            "question": prompt.messages[-1]["content"] if prompt.messages else "",
            "answer": prompt.row.get("answer"),
            "right": count,
            "responses": [text for text, _ in judged[:_SHOWN]],
        }
        for prompt, judged, count in zip(prompts, found, right, strict=True)
    ]
    return TaskScores(measures, items)


def _complete(totals: Sequence[float | None]) -> list[float] | None:
    """Return None if one is missing: pass@k with fewer samples would be another measure."""
    known = [total for total in totals if total is not None]
    return known if len(known) == len(totals) else None


def _name(k: int, task: GenerationSettings) -> str:
    return "accuracy" if task.num_samples == 1 else f"pass@{k}"


def read_questions(task: GenerationSettings, candidate: EvalModel) -> list[Prompt]:
    """Return the questions of the task, read once. Raises ConfigError and DataError."""
    return candidate.once(task, lambda: _prompts(task, candidate))


def _prompts(task: GenerationSettings, candidate: EvalModel) -> list[Prompt]:
    recipe = candidate.recipe
    data = task.data if task.data is not None else recipe.data
    if data.seq_len > recipe.data.seq_len:
        raise ConfigError(
            f"data.seq_len={data.seq_len} of the task must be at most data.seq_len={recipe.data.seq_len} of the run",
            code="sequence_length",
            keys=("data.seq_len",),
            fix=f"data: {{seq_len: {recipe.data.seq_len}}} in the task",
        )
    if task.max_new_tokens >= data.seq_len:
        raise ConfigError(
            f"max_new_tokens={task.max_new_tokens} must be less than data.seq_len={data.seq_len}, which includes the "
            "prompt",
            code="sequence_length",
            keys=("max_new_tokens", "data.seq_len"),
            fix=f"max_new_tokens={max(1, data.seq_len // 2)}",
        )
    room = data.seq_len - task.max_new_tokens
    tools_of = candidate.plays.tools_of if task.data is None and candidate.plays is not None else no_tools
    pictures = candidate.pictures
    if pictures is not None:
        refuse_samples(task)
        pictures = replace(pictures, rows=picture_rows(data))
    prepared = prepare_prompts(
        data, candidate.tokenizer, seed=recipe.seed, max_tokens=room, tools_of=tools_of, pictures=pictures
    )
    if task.data is None and prepared.validation is None:
        raise DataError(
            "the task has no data, and the run has no validation rows",
            code="missing_key",
            keys=("data",),
            fix="tasks.NAME.data={path: held_out.jsonl}",
        )
    prompts = list((prepared.validation or prepared.train).prompts)[: task.limit]
    check_tokens([(prompt.origin, prompt.tokens) for prompt in prompts], "task's", candidate.tokenizer, recipe.model)
    check_reward_rows(task.rewards, ((prompt.origin, prompt.row) for prompt in prompts), all_judged=True)
    return prompts
