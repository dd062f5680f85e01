"""Rewards of servers: a scoring server, and a language model as judge. Torch-free."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_range
from automodel_cli.rollout.http import Server
from automodel_cli.rollout.rewards.base import BatchReward, Many, Reward, RewardInput
from automodel_cli.rollout.rewards.text import check_pattern


@dataclass(frozen=True, kw_only=True)
class ScoreServer(BatchReward):
    """Scores of a custom server at `url` + `path`, for several samples per request.

    The request is `{"samples": [{"completion": text, "messages": [...], "row": {...}, "group": number}, ...]}`. The
    response is `{"scores": [number, ...]}` in the same order, null if the reward does not apply. A request has up to
    `batch_size` samples (complete groups with `whole_groups`). Up to `concurrency` requests are open, each up to
    `timeout` seconds, repeated up to `retries` times. The environment variable `api_key_env` contains the bearer
    token.
    """

    per: ClassVar[Many] = "batch"

    url: str
    """Address of the server."""
    path: str = "/score"
    """Path of the request, appended to `url`."""
    batch_size: int = 64
    """Maximum number of samples per request."""
    whole_groups: bool = False
    """Send the samples of a group in one request."""
    timeout: float | None = 60.0
    """Seconds for one request. null: no limit."""
    concurrency: int = 8
    """Maximum number of concurrent requests."""
    retries: int = 2
    """Number of retries of a failed request."""
    api_key_env: str | None = None
    """Environment variable with the bearer token. null: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_url(self.url)
        check_range("batch_size", self.batch_size, at_least=1, fix="batch_size=64")

    def check(self) -> None:
        """Raise ConfigError if the server does not respond."""
        _check_answers(self.url)

    def scores(self, samples: Sequence[RewardInput]) -> list[float | None]:
        """Raises ServerError, or ValueError for an invalid response."""
        server = _server(self.url, self.timeout, self.retries, self.api_key_env)
        with ThreadPoolExecutor(self.concurrency) as threads:
            scores_of_batches = threads.map(lambda some: self._asked(server, some), self._batches(samples))
            return [score for scores in scores_of_batches for score in scores]

    def _asked(self, server: Server, samples: Sequence[RewardInput]) -> list[float | None]:
        told = [{"completion": s.completion, "messages": s.messages, "row": s.row, "group": s.group} for s in samples]
        answer = server.post(self.path, {"samples": told})
        match answer:
            case {"scores": list() as scores} if len(scores) == len(samples):
                return scores  # one that is no number is an error of its sample
        raise ValueError(f'{self.url}{self.path} answered {answer!r:.200}, not {{"scores": [{len(samples)} numbers]}}')

    def _batches(self, samples: Sequence[RewardInput]) -> Iterator[Sequence[RewardInput]]:
        begin = 0
        while begin < len(samples):
            end = min(begin + self.batch_size, len(samples))
            while self.whole_groups and end < len(samples) and samples[end].group == samples[end - 1].group:
                end += 1
            yield samples[begin:end]
            begin = end


NUMBER = (
    r"(?<![\d.])(?<!\d[-–])(?<!/)(?<!/ )(?i:(?<!out of )(?<!scale of )(?<!scale from )(?<!from )(?<!to )(?<!between ))"
    r"(?!\d+\s*(?:[-–]|to)\s*\d)(\d+(?:\.\d+)?)"
)
"""A number that is neither the denominator of a fraction nor an end of a range."""


@dataclass(frozen=True, kw_only=True)
class ModelJudge(Reward):
    """Score of a language model behind an OpenAI-compatible server.

    `instruction` is its prompt, with `{question}` (last user message), `{completion}` and `{columns}` of the row by
    name. The score is the number in the last match of `pattern` in its reply, divided by `best`. Up to `concurrency`
    requests are open, each up to `timeout` seconds. Decoding is greedy.
    """

    limits_itself: ClassVar[bool] = True

    url: str
    """Address of an OpenAI-compatible server."""
    model: str
    """Name of the judge model."""
    instruction: str
    """Prompt of the judge, with `{question}`, `{completion}` and `{columns}` of the row in braces."""
    pattern: str = NUMBER
    """Regular expression whose first group, in its last match, is the score. By default a number that names no scale:
    of `3/10`, `3 out of 10` and `3 on a scale of 0 to 10` it is 3."""
    best: float = 10.0
    """Judge score that corresponds to a reward of 1."""
    max_tokens: int = 256
    """Maximum tokens of the judge's reply."""
    timeout: float | None = 120.0
    """Seconds for one request to the judge. null: no limit."""
    retries: int = 2
    """Maximum repetitions of a failed request to the judge."""
    api_key_env: str | None = None
    """Environment variable with the API key. null: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_url(self.url)
        check_pattern("pattern", self.pattern, groups=1)
        if "{completion}" not in self.instruction:
            raise ConfigError(
                "instruction must contain {completion}, which is replaced by the response",
                code="invalid_value",
                keys=("instruction",),
                fix="instruction='Rate this answer from 0 to 10: {completion}'",
            )
        check_range("best", self.best, above=0, fix="best=10")

    @property
    def columns(self) -> tuple[str, ...]:
        names = re.findall(r"\{(\w+)\}", self.instruction)
        return tuple(name for name in names if name not in ("question", "completion"))

    def check(self) -> None:
        """Raise ConfigError if the server does not respond."""
        _check_answers(self.url)

    async def score(self, sample: RewardInput) -> float:  # type: ignore[override]  # awaited by RewardSum
        """Raises ServerError, or ValueError if the reply contains no number."""
        return await asyncio.to_thread(self._asked, sample)

    def _asked(self, sample: RewardInput) -> float:
        asked = [m["content"] for m in sample.messages if m.get("role") == "user"]
        known = {"question": asked[-1] if asked else "", "completion": sample.completion}
        known |= {name: sample.column(name) for name in self.columns}
        text = re.sub(r"\{(\w+)\}", lambda found: str(known[found[1]]), self.instruction)
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": 0.0,
            "max_tokens": self.max_tokens,
        }
        answer = _server(self.url, self.timeout, self.retries, self.api_key_env).post("/v1/chat/completions", body)
        said = answer["choices"][0]["message"]["content"] or ""
        numbers = re.findall(self.pattern, said)
        if not numbers:
            raise ValueError(f"the judge said no number: {said!r:.200}")
        return min(float(numbers[-1]) / self.best, 1.0)


def _server(url: str, timeout: float | None, retries: int, api_key_env: str | None) -> Server:
    key = None if api_key_env is None else os.environ.get(api_key_env)
    return Server(url, timeout=600.0 if timeout is None else timeout, retries=retries, api_key=key, setting="url")


def _check_url(url: str) -> None:
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ConfigError(
            f"url={url!r} must be an http or https address",
            code="invalid_value",
            keys=("url",),
            fix="url=http://localhost:8001",
        )


def _check_answers(url: str) -> None:
    """Raise ConfigError if no server listens. Otherwise every score of the run would fail."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((str(parts.hostname), port), timeout=10).close()
    except OSError as error:
        raise ConfigError(
            f"url={url} does not respond ({error})",
            code="server_unreachable",
            keys=("url",),
            fix="start the server, or set url",
        ) from error
