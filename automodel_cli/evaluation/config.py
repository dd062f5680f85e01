"""Config of `automodel eval`: tasks and bootstrap settings. Torch-free.

A custom task is a node with `run(candidate)` (see `evaluation/eval_model.py`) that returns an `Outcome`. Tasks are
part of a run's validations too (`validation.tasks`).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_minimums
from automodel_cli.evaluation.settings import GenerationSettings, MultipleChoiceSettings

if TYPE_CHECKING:
    from automodel_cli.evaluation.eval_model import EvalModel
    from automodel_cli.evaluation.scores import TaskScores


class EvalTask(Protocol):
    """One task of an evaluation."""

    @abstractmethod
    def run(self, candidate: EvalModel) -> TaskScores:
        """Generate responses with one model and score them. Collective."""
        ...


@runtime_checkable
class Prepared(Protocol):
    """A task that validates its questions before training. Custom tasks may omit it."""

    def prepare(self, candidate: EvalModel) -> None:
        """Collective."""


@dataclass(frozen=True, kw_only=True)
class Generation(GenerationSettings):
    """Questions that the model answers; rewards score the responses."""

    def prepare(self, candidate: EvalModel) -> None:
        """Read the questions, and see that this model can be sampled from. Raises ConfigError and DataError."""
        from automodel_cli.evaluation.generation import read_questions

        read_questions(self, candidate)
        if candidate.pictures is None:
            _ = candidate.sampler

    def run(self, candidate: EvalModel) -> TaskScores:
        from automodel_cli.evaluation.generation import ask

        return ask(self, candidate)


@dataclass(frozen=True, kw_only=True)
class MultipleChoice(MultipleChoiceSettings):
    """Questions with choices. The model selects the choice with the highest log-prob."""

    def prepare(self, candidate: EvalModel) -> None:
        """Read the questions. Raises DataError."""
        from automodel_cli.evaluation.multiple_choice import read_choice_questions

        read_choice_questions(self, candidate)

    def run(self, candidate: EvalModel) -> TaskScores:
        from automodel_cli.evaluation.multiple_choice import score_choices

        return score_choices(self, candidate)


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Root of an evaluation config: tasks by name, and settings of the confidence intervals."""

    tasks: dict[str, EvalTask]
    num_resamples: int = 10_000
    """Resamples of the bootstrap behind each interval."""

    def __post_init__(self) -> None:
        check_minimums(self, num_resamples=1)
        if not self.tasks:
            raise ConfigError("tasks must have at least one entry", code="empty_value", keys=("tasks",))

    def longest(self) -> int:
        """Return the maximum tokens of a prompt with its response. 0: the run's data decide."""
        own = [task.data.seq_len for task in self.tasks.values() if isinstance(task, Generation) and task.data]
        return max(own, default=0)
