"""Values that the parts of a rollout exchange: completions, messages, scores and samples. Torch-free at import."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from automodel_cli.config.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from automodel_cli.data.preparation.prompts import Prompt

FinishReason = Literal["stop", "length"]
CudaGraphs = Literal["auto"] | bool
"""Whether the sampler's decoding steps are CUDA graphs."""
WeightStream = Iterable[Sequence[tuple[str, "Tensor"]]]
"""Buckets of (hub name, full tensor); every parameter of the model once."""
Message = dict[str, Any]
EpisodeEnd = Literal["stop", "length", "turns", "error", "timeout"]
"""`stop`: the environment is done. `length`: a message was cut off, or the row has no room for another. `turns`: the
environment would have gone on after the last turn. `error`: the environment raised; `timeout`: it took too long. After
these two the episode has failed."""


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn.

    `temperature` 0 is greedy, and then `top_p` and `top_k` have nothing to do and must be left alone. `top_k` 0 keeps
    all tokens. `seed` makes one call repeatable without touching the caller's random state; None draws from that state.
    `routing`: completions shall tell which experts each token went to.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    routing: bool = False

    def __post_init__(self) -> None:
        rules = (
            ("max_new_tokens", self.max_new_tokens >= 1, "must be at least 1", "max_new_tokens=256"),
            ("temperature", self.temperature >= 0, "must be at least 0 (0 is greedy)", "temperature=1.0"),
            ("top_p", 0 < self.top_p <= 1, "must be above 0 and at most 1", "top_p=1.0"),
            ("top_k", self.top_k >= 0, "must be at least 0 (0 keeps all tokens)", "top_k=0"),
        )
        for name, holds, rule, fix in rules:
            if not holds:
                raise ConfigError(f"{name}={getattr(self, name)} {rule}", code="out_of_range", keys=(name,), fix=fix)
        if self.greedy and (self.top_p != 1 or self.top_k != 0):
            raise ConfigError(
                f"top_p={self.top_p}, top_k={self.top_k} have no effect with temperature=0",
                code="no_effect",
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
    greedy. `weight_version` counts the weight updates that the engine had seen when it drew the oldest of the tokens;
    `token_versions` says it of each, None where it is the same (or known) for all. `prompt_tokens`: what the engine
    says that it read where that is not the prompt. `routed_experts`, where it was asked for: small integers
    `[tokens, layers, k]`, the experts of each token that the model read, which is all of prompt and completion but the
    last; layers are those with experts, or all of the model's.
    """

    tokens: list[int]
    logprobs: list[float]
    finish_reason: FinishReason
    weight_version: int
    prompt_tokens: list[int] | None = None
    token_versions: list[int] | None = None
    routed_experts: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def versions(self) -> list[int]:
        """The weight version of each token."""
        return [self.weight_version] * len(self.tokens) if self.token_versions is None else self.token_versions


@dataclass(frozen=True)
class Score:
    """What one sample got. `parts` are the rewards before their weights, without those that went wrong and those that
    gave None; `errors` says why the former did. `valid` False: leave the sample out of training."""

    total: float
    parts: dict[str, float]
    errors: dict[str, str]
    valid: bool = True


@dataclass
class Account:
    """What an episode has cost its environment so far: `seconds` of all steps with their tries and pauses, `slowest` of
    one step; tries that raised or took too long and were made again (`retries`), and tries that took too long."""

    seconds: float = 0.0
    slowest: float = 0.0
    retries: int = 0
    timeouts: int = 0


@dataclass(frozen=True)
class Sample:
    """The `index`-th response to `prompt`; `place` is where the prompt stands in the endless stream of prompts, and
    names the group.

    Of several turns `tokens` holds what the environment said too: `generated` tells the model's own apart (None: all of
    them), `said` are the messages after the prompt, and `text` is the last of the model's; `environment` is the name of
    who answered, and `account` what that cost. `routed_experts` `[tokens, layers, k]`: of prompt and response, as
    far as it is known.
    """

    place: int
    index: int
    prompt: Prompt
    tokens: list[int]
    logprobs: list[float]
    text: str
    finish_reason: EpisodeEnd
    weight_version: int
    score: Score
    generated: list[bool] | None = None
    said: list[Message] = field(default_factory=list)
    environment: str | None = None
    account: Account | None = None
    token_versions: list[int] | None = None
    routed_experts: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def failed(self) -> bool:
        """Whether its environment failed."""
        return self.finish_reason in ("error", "timeout")

    @property
    def truncated(self) -> bool:
        return self.finish_reason in ("length", "turns")

    @cached_property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt.tokens) + len(self.tokens)

    @property
    def num_generated(self) -> int:
        """Tokens that the model drew."""
        return len(self.tokens) if self.generated is None else sum(self.generated)

    @property
    def drawn_versions(self) -> list[int]:
        """By which weights each token was drawn that the model drew; the oldest of the sample's where it is not known
        of each."""
        known = [self.weight_version] * len(self.tokens) if self.token_versions is None else self.token_versions
        return known if self.generated is None else [v for v, drawn in zip(known, self.generated, strict=True) if drawn]

    @property
    def num_turns(self) -> int:
        """Messages of the model."""
        return 1 if self.generated is None else sum(message["role"] == "assistant" for message in self.said)

    def generated_T(self) -> Tensor:
        """Which of `tokens` the model drew."""
        import torch

        return torch.tensor([True] * len(self.tokens) if self.generated is None else self.generated)

    def at_generated(self, value: float) -> Tensor:
        """`value` at those of `tokens` that the model drew, 0 at the others; float32."""
        import torch

        return torch.full((len(self.tokens),), value) if self.generated is None else value * self.generated_T()
