"""Evaluation tasks during training (`validation.tasks`), on the model under training."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from automodel_cli.config.errors import ConfigError
from automodel_cli.evaluation.config import Generation, Prepared
from automodel_cli.evaluation.settings import refuse_samples
from automodel_cli.evaluation.task_errors import errors_of
from automodel_cli.training.callback import Callback, Run

if TYPE_CHECKING:
    from automodel_cli.evaluation.eval_model import EvalModel
    from automodel_cli.evaluation.scores import TaskScores
    from automodel_cli.run.recipe import Recipe
    from automodel_cli.run.trainer import Trainer


def check_tasks(recipe: Recipe) -> None:
    """Raise ConfigError for invalid `validation.tasks`, before anything is built."""
    for name, task in recipe.validation.tasks.items():
        key = f"validation.tasks.{name}"
        if recipe.score_head is not None:
            raise ConfigError(
                f"{key} is not supported for classifiers, which generate no text",
                code="wrong_model_kind",
                keys=("validation.tasks",),
                fix="remove validation.tasks",
            )
        if not re.fullmatch(r"[A-Za-z]\w*", name):
            raise ConfigError(
                f"{key}: a task name must have only letters, digits and _, because it is part of metric names",
                code="invalid_value",
                keys=("validation.tasks",),
                fix=f"{re.sub(r'[^A-Za-z0-9_]', '_', name)} in place of {name}",
            )
        if isinstance(task, Generation):
            _check_generation(recipe, task, key)


def _check_generation(recipe: Recipe, task: Generation, key: str) -> None:
    longest = recipe.data.seq_len
    if recipe.model.vision is not None:
        refuse_samples(task, key)
    elif "sampler" not in recipe.parallelizer.supports:
        raise ConfigError(
            f"{key} is not supported with parallelizer={recipe.parallelizer.name}, because the sampler cannot read its "
            "sharded weights",
            code="unsupported_combination",
            keys=(key, "parallelizer"),
            fix="parallelizer=fsdp2",
        )
    if task.data is not None and task.data.seq_len > longest:
        raise ConfigError(
            f"{key}.data.seq_len={task.data.seq_len} must be at most data.seq_len={longest}",
            code="sequence_length",
            keys=(f"{key}.data.seq_len", "data.seq_len"),
            fix=f"{key}.data.seq_len={longest}",
        )
    seq_len = task.data.seq_len if task.data is not None else longest
    if task.max_new_tokens >= seq_len:
        raise ConfigError(
            f"{key}.max_new_tokens={task.max_new_tokens} must be less than the sequence length {seq_len}, which "
            "includes the prompt",
            code="sequence_length",
            keys=(f"{key}.max_new_tokens",),
            fix=f"{key}.max_new_tokens={max(1, seq_len // 2)}",
        )


def add_tasks(session: Trainer) -> None:
    """Add the tasks of this run to its validations. Collective. Their questions are read immediately."""
    if session.recipe.validation.tasks:
        session.callbacks.add(ValidationTasks(session))


class ValidationTasks(Callback):
    """The mean of each measure of each task: `val_TASK_accuracy`, `val_TASK_pass_at_4`, `val_TASK_reward`."""

    def __init__(self, session: Trainer):
        from automodel_cli.evaluation.eval_model import EvalModel

        self._tasks = session.recipe.validation.tasks
        self._candidate: EvalModel = EvalModel.of_session(session)
        for name, task in self._tasks.items():
            if isinstance(task, Prepared):
                with errors_of(f"validation.tasks.{name}"):
                    task.prepare(self._candidate)

    def on_validation(self, run: Run, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Collective."""
        metrics: dict[str, float] = {}
        for name, task in self._tasks.items():
            outcome: TaskScores = task.run(self._candidate)
            known = {measure: mean for measure, mean in outcome.means.items() if not math.isnan(mean)}
            metrics |= {f"val_{name}_{re.sub(r'[^A-Za-z0-9_]', '_at_', m)}": mean for m, mean in known.items()}
            run.print(f"step {step}: {outcome.line(name)}")
        return metrics
