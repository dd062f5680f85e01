"""Checks of the data files that `check` and `submit` make before a rank starts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.config.warn import warn
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
    rows_of_a_step: Mapping[str, int],
    kind: DataKind,
    prompts: bool,
) -> Iterator[ConfigError]:
    """Yield errors of unreadable data, and of a learning-rate schedule that is longer than the run.

    Logs a warning if an epoch has fewer sequences than a step.
    """
    problems = list(head_problems(data, kind=kind, prompts=prompts))
    yield from problems
    if problems:
        return
    try:
        rows = most_rows(data)
    except DataError:
        rows = None
    if rows is not None:
        warn_of_repeated_rows(math.ceil(rows), **rows_of_a_step, row_name="prompts" if prompts else "rows")
    global_batch_size = min(rows_of_a_step["global_batch_size"], *train.batch_sizes)
    if (problem := _schedule_problem(rows, train, lr_scheduler, global_batch_size)) is not None:
        yield problem


def warn_of_repeated_rows(
    rows_per_epoch: int, *, global_batch_size: int, microbatch_size: int, row_name: str, dp_size: int = 1
) -> None:
    """Warn if an epoch has fewer sequences than a step, which then trains some of them several times.

    `rows_per_epoch` may be an upper bound.
    """
    if rows_per_epoch >= global_batch_size:
        return
    key = "rollout.prompts_per_step" if row_name == "prompts" else "train.global_batch_size"
    fitting = min(microbatch_size, rows_per_epoch // dp_size)
    instead = "more data"
    if fitting:
        instead = f"{key}={rows_per_epoch // (fitting * dp_size) * fitting * dp_size}"
        instead += f" train.microbatch_size={fitting}" if fitting < microbatch_size else ""
    warn(
        "repeated_rows",
        "%s=%d: a step needs more %s than an epoch has (%d), so it uses some of them several times; try %s",
        *(key, global_batch_size, row_name, rows_per_epoch, instead),
    )


def _schedule_problem(
    rows: float | None, train: TrainConfig, lr_scheduler: ScheduleNode, global_batch_size: int
) -> ConfigError | None:
    warmup = getattr(lr_scheduler, "num_warmup_steps", None)
    num_steps = train.max_steps if rows is None else train.num_steps(math.ceil(rows / global_batch_size))
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
