"""The settings of the built-in tasks, without what runs them (`generation.py`, `choice.py`). Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.config import DataConfig
from automodel_cli.rollout.rewards.base import RewardFunction
from automodel_cli.rollout.rewards.text import ExactAnswer


def at_least_one(**fields: int | None) -> None:
    """Raise ConfigError for a number below 1."""
    for name, value in fields.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1", keys=(name,), fix=f"{name}=1")


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """The fields of `Generation`."""

    data: DataConfig | None = None
    """The rows to ask, with the column that the rewards read (`answer`); all of them, but of a task or of data with a
    validation split that one only; each gets one message. null: those of the run, its validation rows, which begin
    conversations where the run has environments; `rewards` judge the last message, and nothing else counts."""
    rewards: dict[str, RewardFunction] = field(default_factory=lambda: {"exact": ExactAnswer()})
    """What judges a response, by name. Default: right is the very text of `answer`."""
    threshold: float = 1.0
    """A response is right where the weighted sum of the rewards reaches this."""
    num_samples: int = 1
    """Responses to each question; 1 at `temperature` 0 is the greedy one."""
    temperature: float = 0.0
    """Of the samples; 0 is greedy."""
    top_p: float = 1.0
    """Samples come from the likeliest tokens that have this much of the probability together."""
    max_new_tokens: int = 64
    """Tokens of a response, or of one message of a conversation, at most."""
    pass_at: list[int] = field(default_factory=lambda: [1])
    """For each k the chance that one of k responses is right, estimated without bias from `num_samples`
    (arXiv:2107.03374, equation 1)."""
    limit: int | None = None
    """Questions at most, the first ones."""
    seed: int = 0
    """Of the samples: a sample depends on it, its question and the weights alone."""

    def __post_init__(self) -> None:
        at_least_one(num_samples=self.num_samples, max_new_tokens=self.max_new_tokens, limit=self.limit)
        if not self.rewards:
            raise ConfigError("no reward says which answers are right", keys=("rewards",))
        if not self.pass_at or min(self.pass_at) < 1 or max(self.pass_at) > self.num_samples:
            raise ConfigError(
                f"pass_at={self.pass_at}: each must be from 1 to num_samples={self.num_samples}",
                keys=("pass_at", "num_samples"),
                fix="pass_at=[1]" if not self.pass_at or min(self.pass_at) < 1 else f"num_samples={max(self.pass_at)}",
            )
        if self.num_samples > 1 and self.temperature == 0:
            raise ConfigError(
                f"num_samples={self.num_samples} at temperature=0 are the same response so many times",
                keys=("num_samples", "temperature"),
                fix="temperature=1.0",
            )


@dataclass(frozen=True, kw_only=True)
class MultipleChoiceSettings:
    """The fields of `MultipleChoice`."""

    path: str
    """JSON lines with `question` (or `messages`), `choices` (texts) and `answer` (a number from 0, or the text of a
    choice). Through the chat template where the tokenizer has one."""
    normalize: Literal["none", "tokens", "characters"] = "none"
    """What the log-prob of a choice is divided by: nothing, its tokens or its characters."""
    limit: int | None = None
    """Questions at most, the first ones."""

    def __post_init__(self) -> None:
        at_least_one(limit=self.limit)
