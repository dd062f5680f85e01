"""Convert pending rollouts of a checkpoint to and from JSON values, bitwise identical."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NotRequired, TypedDict, cast

import numpy as np

from automodel_cli.rollout.environments.episode import Episode
from automodel_cli.rollout.routed_experts import from_text, to_text
from automodel_cli.rollout.types import Account, Completion, EpisodeEnd, FinishReason

Answer = Completion | Episode
Place = tuple[int, int]
"""Place of the prompt, index of the sample in its group."""


class PackedSamples(TypedDict):
    """Answers of a rollout as JSON values. Values per token are the bytes of one array, in base64."""

    places: list[list[int]]
    lengths: list[int]
    tokens: str
    logprobs: str
    versions: str
    finish_reasons: list[EpisodeEnd]
    weight_versions: list[int]
    routed_experts: NotRequired[list[str | None]]
    generated: NotRequired[str]
    turns: NotRequired[list[dict[str, Any]]]


class QueueState(TypedDict):
    """Pending samples in a checkpoint, and the settings that sampled them."""

    settings: dict[str, object]
    rollouts: list[PackedSamples]


def pack_samples(found: Mapping[Place, Answer]) -> PackedSamples:
    """Return answers as JSON values. Values per token are stored as the bytes of one array."""
    answers = list(found.values())
    columns: PackedSamples = {
        "places": [[*key] for key in found],
        "lengths": [len(answer.tokens) for answer in answers],
        "tokens": _text(np.array([token for answer in answers for token in answer.tokens], "<i8")),
        "logprobs": _text(np.array([logprob for answer in answers for logprob in answer.logprobs], "<f8")),
        "versions": _text(np.array([version for answer in answers for version in answer.versions], "<i8")),
        "finish_reasons": [answer.finish_reason for answer in answers],
        "weight_versions": [answer.weight_version for answer in answers],
    }
    if any(answer.routed_experts is not None for answer in answers):
        experts = [answer.routed_experts for answer in answers]
        columns["routed_experts"] = [None if chosen is None else to_text(chosen) for chosen in experts]
    episodes = [answer for answer in answers if isinstance(answer, Episode)]
    if not episodes:
        return columns
    generated = np.array([flag for episode in episodes for flag in episode.generated], "u1")
    return {**columns, "generated": _text(generated), "turns": [_turns(episode) for episode in episodes]}


def unpacked(state: PackedSamples) -> dict[Place, Answer]:
    """Return the answers that `pack_samples` received. Episodes have no prompts (see `Episode.about`)."""
    answers: dict[Place, Answer] = (
        _episodes(state) if "turns" in state else {row[0]: _completion(*row[1:]) for row in _rows(state)}
    )
    for (key, answer), text in zip(list(answers.items()), state.get("routed_experts", ()), strict=False):
        if text is not None:
            answers[key] = dataclasses.replace(answer, routed_experts=from_text(text))
    return answers


def _episodes(state: PackedSamples) -> dict[Place, Answer]:
    generated = [bool(flag) for flag in _numbers(state["generated"], "u1")]
    answers: dict[Place, Answer] = {}
    begin = 0
    for (key, tokens, logprobs, versions, reason, _), turns in zip(_rows(state), state["turns"], strict=True):
        flag, begin = generated[begin : begin + len(tokens)], begin + len(tokens)
        answers[key] = Episode(
            **{**turns, "account": Account(**turns["account"])},
            tokens=tokens,
            logprobs=logprobs,
            versions=versions,
            generated=flag,
            finish_reason=reason,
        )
    return answers


def _turns(episode: Episode) -> dict[str, object]:
    """Return the turns of an episode. Values that are not JSON are converted as in rollouts.jsonl."""
    return {
        "response_messages": json.loads(json.dumps(episode.response_messages, default=str)),
        "rewards": [float(reward) for reward in episode.rewards],
        "weight_versions": episode.weight_versions,
        "error": episode.error,
        "account": dataclasses.asdict(episode.account),
    }


def _rows(state: PackedSamples) -> Iterator[tuple[Place, list[int], list[float], list[int], Any, int]]:
    tokens, logprobs = _numbers(state["tokens"], "<i8"), _numbers(state["logprobs"], "<f8")
    versions, ends = _numbers(state["versions"], "<i8"), np.cumsum(state["lengths"]).tolist()
    rows = zip(state["places"], state["lengths"], ends, state["finish_reasons"], state["weight_versions"], strict=True)
    for (place, index), length, end, reason, version in rows:
        span = slice(end - length, end)
        yield (place, index), tokens[span], logprobs[span], versions[span], reason, version


def _completion(
    tokens: list[int], logprobs: list[float], versions: Sequence[int], reason: FinishReason, version: int
) -> Completion:
    of_tokens = None if set(versions) <= {version} else list(versions)
    return Completion(tokens, logprobs, reason, version, token_versions=of_tokens)


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def _numbers(text: str, dtype: str) -> list[Any]:
    return cast(list[Any], np.frombuffer(base64.b64decode(text), dtype).tolist())
