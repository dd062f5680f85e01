"""Settings of the built-in tasks, which `generation.py` and `multiple_choice.py` run. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_minimums
from automodel_cli.data.config import DataConfig
from automodel_cli.rollout.rewards.base import RewardFunction
from automodel_cli.rollout.rewards.text import ExactAnswer


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """The fields of `Generation`."""

    data: DataConfig | None = None
    """Questions, with the columns that the rewards read (`answer`). If the data have a validation split, only it is
    used, and each question gets one message. null: the validation rows of the run, as conversations if the run has
    environments; rewards score the last message."""
    pictures: bool = False
    """Read pictures of the questions with a model that is given by name. Runs of vision-language models always do."""
    rewards: dict[str, RewardFunction] = field(default_factory=lambda: {"exact": ExactAnswer()})
    """Rewards that score a response, by name. Default: the response must equal `answer`."""
    threshold: float = 1.0
    """Weighted sum of the rewards from which on a response is correct."""
    num_samples: int = 1
    """Responses per question. 1 at `temperature` 0 is greedy."""
    temperature: float = 0.0
    """Sampling temperature. 0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling: sample from the most likely tokens with this total probability."""
    max_new_tokens: int = 64
    """Maximum number of tokens of a response, or of one message of a conversation."""
    pass_at: list[int] = field(default_factory=lambda: [1])
    """Values of k of pass@k, estimated without bias from `num_samples` (arXiv:2107.03374, equation 1)."""
    limit: int | None = None
    """Maximum number of questions, the first ones. null: all."""
    seed: int = 0
    """Seed of the samples. A sample depends on the seed, its question and the weights only."""

    def __post_init__(self) -> None:
        check_minimums(self, num_samples=1, max_new_tokens=1, limit=1)
        if not self.rewards:
            raise ConfigError("rewards must have at least one entry", code="empty_value", keys=("rewards",))
        if not self.pass_at or min(self.pass_at) < 1 or max(self.pass_at) > self.num_samples:
            raise ConfigError(
                f"pass_at={self.pass_at} must have numbers from 1 to num_samples={self.num_samples}",
                code="out_of_range" if self.pass_at else "empty_value",
                keys=("pass_at", "num_samples"),
                fix="pass_at=[1]" if not self.pass_at or min(self.pass_at) < 1 else f"num_samples={max(self.pass_at)}",
            )
        if self.num_samples > 1 and self.temperature == 0:
            raise ConfigError(
                f"num_samples={self.num_samples} is not supported with temperature=0, which gives equal samples",
                code="unsupported_combination",
                keys=("num_samples", "temperature"),
                fix="temperature=1.0",
            )


@dataclass(frozen=True, kw_only=True)
class MultipleChoiceSettings:
    """The fields of `MultipleChoice`."""

    path: str
    """JSON lines with `question` (or `messages`), `choices` (texts) and `answer` (an index from 0, or the text of a
    choice). The chat template is applied if there is one."""
    normalize: Literal["none", "tokens", "characters"] = "none"
    """Divisor of the log-prob of a choice: none, its tokens or its characters."""
    limit: int | None = None
    """Maximum number of questions, the first ones. null: all."""

    def __post_init__(self) -> None:
        check_minimums(self, limit=1)


def refuse_samples(task: GenerationSettings, key: str = "tasks.NAME") -> None:
    """Raise ConfigError for sampled answers of a model that reads pictures."""
    if task.temperature == 0:
        return
    raise ConfigError(
        f"{key}.temperature={task.temperature} is not supported with pictures, whose questions are answered greedily",
        code="unsupported_combination",
        keys=(f"{key}.temperature", "model.vision"),
        fix=f"{key}.temperature=0 {key}.num_samples=1 {key}.pass_at=[1]",
    )
