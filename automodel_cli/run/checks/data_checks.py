"""Checks of the data files that `check` and `submit` make before a rank starts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.data.preparation.preview import head_problems, most_rows

if TYPE_CHECKING:
    from automodel_cli.data.config import DataConfig
    from automodel_cli.data.formats.base import DataKind
    from automodel_cli.training.optimizers.lr_scheduler import ScheduleNode
    from automodel_cli.training.train_config import TrainConfig


def data_problems(
    data: DataConfig,
    train: TrainConfig,
    lr_scheduler: ScheduleNode,
    *,
    global_batch_size: int,
    kind: DataKind,
    prompts: bool,
) -> Iterator[ConfigError]:
    """Yield errors of unreadable data, and of a learning-rate schedule that is longer than the run."""
    problems = list(head_problems(data, kind=kind, prompts=prompts))
    yield from problems
    if not problems and (problem := _schedule_problem(data, train, lr_scheduler, global_batch_size)) is not None:
        yield problem


def _schedule_problem(
    data: DataConfig, train: TrainConfig, lr_scheduler: ScheduleNode, global_batch_size: int
) -> ConfigError | None:
    warmup = getattr(lr_scheduler, "num_warmup_steps", None)
    num_steps = _most_steps(data, train, global_batch_size)
    if warmup is None or num_steps is None:
        return None
    try:
        warmup(num_steps)
    except ConfigError as error:
        key = f"lr_scheduler.{error.keys[0]}"
        fix = {
            "lr_scheduler.warmup_steps": "lr_scheduler.warmup_steps=null lr_scheduler.warmup_ratio=0.1",
            "lr_scheduler.decay_steps": "lr_scheduler.decay_steps=null",
        }.get(key, error.fix)
        why = f"; the run has at most {num_steps}" if train.max_steps is None else ""
        return ConfigError(f"{error.message}{why}", code=error.code, keys=(key,), fix=fix)
    return None


def _most_steps(data: DataConfig, train: TrainConfig, global_batch_size: int) -> int | None:
    """Return the largest possible number of optimizer steps, or None if the data does not bound it."""
    try:
        rows = most_rows(data)
    except DataError:
        rows = None
    if rows is None:
        return train.max_steps
    return train.num_steps(math.ceil(rows / global_batch_size))
