"""What a generation engine is: prompts in, tokens with log-probs out, weights replaceable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from automodel_cli.config.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]
WeightStream = Iterable[Sequence[tuple[str, "Tensor"]]]
"""Buckets of (hub name, full tensor); every parameter of the model once."""


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn.

    `temperature` 0 is greedy, and then `top_p` and `top_k` have nothing to do and must be left alone. `top_k` 0 keeps
    all tokens. `seed` makes one call repeatable without touching the caller's random state; None draws from that state.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None

    def __post_init__(self) -> None:
        rules = (
            ("max_new_tokens", self.max_new_tokens >= 1, "must be at least 1", "max_new_tokens=256"),
            ("temperature", self.temperature >= 0, "must be at least 0 (0 is greedy)", "temperature=1.0"),
            ("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1", "top_p=1.0"),
            ("top_k", self.top_k >= 0, "must be at least 0 (0 keeps all tokens)", "top_k=0"),
        )
        for name, holds, rule, fix in rules:
            if not holds:
                raise ConfigError(f"{name}={getattr(self, name)} {rule}", keys=(name,), fix=fix)
        if self.greedy and (self.top_p != 1 or self.top_k != 0):
            raise ConfigError(
                f"top_p={self.top_p}, top_k={self.top_k} do nothing at temperature=0",
                keys=("temperature", "top_p", "top_k"),
                fix="top_p=1.0 top_k=0",
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class Completion:
    """What followed one prompt.

    `tokens` includes the end-of-sequence token when `finish_reason` is "stop". `logprobs[i]` is the log-probability of
    `tokens[i]` under the distribution it was drawn from: after temperature, top-k and top-p; the plain softmax when
    greedy. `weight_version` counts the weight updates that the engine had seen.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_version: int


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do, so that a recipe refuses at the start what would fail at the first rollout."""

    logprobs: bool
    weight_updates: bool


class Engine(Protocol):
    """One generator of completions. Engines share nothing else, and recipes know only this."""

    capabilities: Capabilities
    weight_version: int

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Completion]:
        """One completion for each prompt (token ids, not empty), in the order of the prompts."""

    def update_weights(self, stream: WeightStream) -> None:
        """Replace every weight, then count the version up. The stream is consumed once; nothing of it is kept."""
