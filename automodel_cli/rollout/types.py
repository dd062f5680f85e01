"""Values that the parts of a rollout exchange: completions, messages, scores and samples. Torch-free at import."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_range

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from automodel_cli.data.preparation.prompt_dataset import Prompt

FinishReason = Literal["stop", "length"]
CudaGraphs = Literal["auto"] | bool
"""Whether the sampler's decoding steps are CUDA graphs."""
WeightStream = Iterable[Sequence[tuple[str, "Tensor"]]]
"""Buckets of (hub name, full tensor), which contain every parameter of the model once."""
Message = dict[str, Any]
EpisodeEnd = Literal["stop", "length", "turns", "error", "timeout"]
"""`stop`: the environment is done. `length`: a message was truncated, or the next one does not fit. `turns`: the limit
of turns is reached. `error`: the environment raised an error. `timeout`: it took too long. The last two are
failures."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters.

    `temperature=0` is greedy and excludes `top_p` and `top_k`. `top_k=0` keeps all tokens. `seed` makes a call
    reproducible without the caller's random state. None uses that state. `routing`: completions contain routed
    experts.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    routing: bool = False

    def __post_init__(self) -> None:
        check_range("max_new_tokens", self.max_new_tokens, at_least=1, fix="max_new_tokens=256")
        check_range("temperature", self.temperature, at_least=0, note=" (0 is greedy)", fix="temperature=1.0")
        check_range("top_p", self.top_p, above=0, at_most=1, fix="top_p=1.0")
        check_range("top_k", self.top_k, at_least=0, note=" (0 keeps all tokens)", fix="top_k=0")
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
    """Completion of one prompt.

    - `tokens`: includes the end-of-sequence token if `finish_reason` is "stop".
    - `logprobs[i]`: log-prob of `tokens[i]` under the sampled distribution, after temperature, top-k and top-p. Plain
      softmax if greedy.
    - `weight_version`: number of weight updates before the oldest token was sampled. `token_versions`: the same per
      token, None if equal for all tokens.
    - `prompt_tokens`: the tokens that the engine read, if they differ from the prompt.
    - `routed_experts`: small integers `[tokens, layers, k]`, the experts of each token read (all but the last). Layers
      are the MoE layers, or all layers of the model.
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

    def about(self, index: int, prompt: Prompt) -> Completion:
        """Return itself: a completion contains nothing of its prompt. An episode does (`Episode.about`)."""
        return self

    def without_prompt(self) -> Completion:
        """Return itself, as above."""
        return self


@dataclass(frozen=True)
class Score:
    """Score of one sample. `parts`: unweighted rewards that returned a number. `errors`: messages of failed rewards.
    `valid=False`: exclude the sample from training."""

    total: float
    parts: dict[str, float]
    errors: dict[str, str]
    valid: bool = True


@dataclass
class Account:
    """Cost of an episode in its environment: `seconds` of all steps with retries and pauses, `slowest` step, number of
    `retries`, and number of timeouts."""

    seconds: float = 0.0
    slowest: float = 0.0
    retries: int = 0
    timeouts: int = 0


@dataclass(frozen=True)
class Sample:
    """The `index`-th response to `prompt`. `place` is the index of the prompt in the endless stream of prompts, and
    identifies the group.

    In an episode of several turns:

    - `tokens` include the tokens of the environment. `generated` marks those of the model (None: all).
    - `response_messages`: messages after the prompt. `text`: the last message of the model.
    - `environment`: name of the environment. `account`: its cost.

    `routed_experts` `[tokens, layers, k]`: of prompt and response, as far as they are available.
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
    response_messages: list[Message] = field(default_factory=list)
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
        """Return the weight version of each generated token. The oldest version of the sample if versions per token
        are not available."""
        known = [self.weight_version] * len(self.tokens) if self.token_versions is None else self.token_versions
        return (
            known
            if self.generated is None
            else [v for v, is_generated in zip(known, self.generated, strict=True) if is_generated]
        )

    @property
    def num_turns(self) -> int:
        """Messages of the model."""
        return (
            1 if self.generated is None else sum(message["role"] == "assistant" for message in self.response_messages)
        )

    def generated_T(self) -> Tensor:
        """Which of `tokens` the model drew."""
        import torch

        return torch.tensor([True] * len(self.tokens) if self.generated is None else self.generated)

    def at_generated(self, value: float) -> Tensor:
        """Return `value` at generated tokens and 0 at other `tokens`; float32."""
        import torch

        return torch.full((len(self.tokens),), value) if self.generated is None else value * self.generated_T()
