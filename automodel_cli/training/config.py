"""The sections `validation`, `checkpoint` and `logging`: intervals and outputs of a run. Torch-free."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_choice, check_positive
from automodel_cli.training.early_stopping import LOSS, Goal
from automodel_cli.training.trackers import TrackerName, TrackerNode, tracker_nodes


class ValidationTask(Protocol):
    """Interface of a task of `automodel eval` (`evaluation/config.py`)."""

    @abstractmethod
    def run(self, candidate: Any) -> Any:
        """Generate responses with the model in training and score them. Collective."""
        ...


@dataclass(frozen=True)
class ValidationConfig:
    """Interval and size of validations, and the metric of the best checkpoint.

    With `patience`, the run ends after this number of consecutive validations without improvement. Then each
    improvement is saved, and the best checkpoint is exported.
    """

    every: int | None = None
    """Steps between validations. null: none during the run."""
    num_batches: int | None = None
    """Microbatches per rank and validation. null: all."""
    at_start: bool = False
    """Validate before the first step."""
    at_end: bool = True
    """Validate after the last step."""
    tasks: dict[str, ValidationTask] = field(default_factory=dict)
    """Evaluation tasks by name, in addition to the loss. They need no validation rows."""
    patience: int | None = None
    """Number of validations without improvement after which the run ends. null: no early stopping."""
    metric: str = LOSS
    """Metric of the best checkpoint: `val_loss`, `val_reward`, `val_TASK_accuracy`, ..."""
    direction: Literal["min", "max"] | None = None
    """Whether a smaller or a larger `metric` is better. null: smaller, allowed for `val_loss` only."""

    def __post_init__(self) -> None:
        check_positive("validation", every=self.every, num_batches=self.num_batches, patience=self.patience)
        check_choice("direction", self.direction, ("min", "max", None), fix="validation.direction=min")
        if self.direction is None and self.metric != LOSS:
            raise ConfigError(
                f"metric={self.metric} requires direction: min if smaller values are better, max if larger ones are",
                code="requires_setting",
                keys=("metric", "direction"),
                fix="validation.direction=max, or validation.direction=min",
            )
        if self.patience is not None and self.every is None:
            raise ConfigError(
                f"patience={self.patience} has no effect with every=null, because no validation runs during training",
                code="no_effect",
                keys=("patience", "every"),
                fix="validation.every=100, or validation.patience=null",
            )

    @property
    def goal(self) -> Goal:
        """Metric and direction of the best checkpoint."""
        return Goal(self.metric, self.direction == "max")

    def due(self, step: int, num_steps: int) -> bool:
        """Return whether a validation is due after optimizer step `step` (1-based; 0 is before the first step)."""
        if step == 0:
            return self.at_start
        if step == num_steps:
            return self.at_end or self._on_beat(step)
        return self._on_beat(step)

    def _on_beat(self, step: int) -> bool:
        return self.every is not None and step % self.every == 0


@dataclass(frozen=True)
class CheckpointConfig:
    """Interval of checkpoints, and which are kept. An interrupted run always saves a checkpoint."""

    every: int | None = None
    """Steps between checkpoints. null: only at the end."""
    keep_latest_k: int | None = 3
    """Number of newest checkpoints to keep, in addition to the best one. null: all."""
    async_save: bool = False
    """Copy the state and write it during training."""
    new_data: Literal["refuse", "restart"] = "refuse"
    """Resuming with other data than those of the checkpoint: `refuse` is an error, `restart` reads the new data from
    their start and keeps weights, optimizer and step."""
    resume: str | None = None
    """`auto` resumes from the newest complete checkpoint of the run folder. Another value is the folder of a
    checkpoint. null: start at step 0."""
    save_final: bool = True
    """Save a checkpoint after the last step."""
    export_check_minutes: float = 30.0
    """Time limit in minutes of the comparison of the export with the trained model on rank 0. 0: no comparison."""

    def __post_init__(self) -> None:
        check_positive("checkpoint", every=self.every, keep_latest_k=self.keep_latest_k)
        if not 0 <= self.export_check_minutes < math.inf:
            raise ConfigError(
                f"export_check_minutes={self.export_check_minutes} must be finite and at least 0",
                code="out_of_range",
                keys=("export_check_minutes",),
                fix="checkpoint.export_check_minutes=30",
            )
        if self.resume is not None and not self.resume.strip():
            raise ConfigError(
                f"resume={self.resume!r} must not be empty",
                code="empty_value",
                keys=("resume",),
                fix="checkpoint.resume=auto",
            )

    def due(self, step: int, num_steps: int) -> bool:
        """Return whether a checkpoint is due after optimizer step `step` (1-based)."""
        if step == num_steps and self.save_final:
            return True
        return self.every is not None and step % self.every == 0


@dataclass(frozen=True)
class ProfileConfig:
    """Trace of `num_steps` steps by the torch profiler, starting with `start_step` (1-based), in `<run>/profile/`."""

    start_step: int = 3
    """First step of the trace, counted from 1."""
    num_steps: int = 2
    """Number of steps in the trace."""
    ranks: tuple[int, ...] = (0,)
    """Global ranks that record."""
    memory: bool = False
    """Record allocations too, which makes large traces."""
    stacks: bool = False
    """Record source lines too, which makes large traces."""

    def __post_init__(self) -> None:
        check_positive("logging.profile", start_step=self.start_step, num_steps=self.num_steps)
        if not self.ranks or min(self.ranks) < 0:
            raise ConfigError(
                f"ranks={list(self.ranks)} must contain at least one rank, and ranks must be at least 0",
                code="out_of_range" if self.ranks else "empty_value",
                keys=("ranks",),
                fix="logging.profile.ranks=[0]",
            )


@dataclass(frozen=True)
class LoggingConfig:
    """Console output, trackers and reports of a run.

    `every` is the interval of printed lines, and of the device synchronization that fetches their numbers.
    `metrics.jsonl` has one row per step in any case.
    """

    every: int = 1
    """Steps between console lines. `metrics.jsonl` has one line per step in any case."""
    console: Literal["auto", "live", "plain"] = "auto"
    """`live` redraws one line, `plain` prints lines. `auto` is `live` on a terminal."""
    trackers: list[TrackerName | TrackerNode] = field(default_factory=list)
    """Trackers by name (tensorboard, wandb, mlflow, trackio) or nodes of `automodel_cli.training.trackers`."""
    profile: ProfileConfig | None = None
    """Record a profiler trace. null: none."""
    report: bool = True
    """Write report.html and loss.svg at the end."""

    def __post_init__(self) -> None:
        check_positive("logging", every=self.every)
        tracker_nodes(self.trackers)
