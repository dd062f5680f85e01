"""What `check` and `submit` know of a run from its data files, before a rank is started."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.data.head import head_problems, most_rows

if TYPE_CHECKING:
    from automodel_cli.run.recipe import Recipe


def data_problems(recipe: Recipe) -> Iterator[ConfigError]:
    """Data that no format reads, and a schedule that is longer than the data can make the run."""
    found = list(head_problems(recipe.data, preferences=recipe.preferences, prompts=recipe.row_name == "prompts"))
    yield from found
    if not found and (problem := _schedule_problem(recipe)) is not None:
        yield problem


def _schedule_problem(recipe: Recipe) -> ConfigError | None:
    warmup = getattr(recipe.lr_scheduler, "num_warmup_steps", None)
    num_steps = _most_steps(recipe)
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
        why = f"; the run has at most {num_steps}" if recipe.train.max_steps is None else ""
        return ConfigError(f"{error.message}{why}", keys=(key,), fix=fix)
    return None


def _most_steps(recipe: Recipe) -> int | None:
    """Optimizer steps that the run has at most; None where nothing bounds it."""
    try:
        rows = most_rows(recipe.data)
    except DataError:
        rows = None
    if rows is None:
        return recipe.train.max_steps
    return recipe.train.num_steps(math.ceil(rows / recipe.rows_of_a_step()["global_batch_size"]))
