"""Learning-rate schedule of a run that resumes with another number of steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from automodel_cli.config.errors import RunError
from automodel_cli.training.checkpoint.directory import read_meta
from automodel_cli.training.optimizers.schedule_plan import SchedulePlan, differ

if TYPE_CHECKING:
    from automodel_cli.run.recipe import Recipe

KEY = "schedule"
"""Key of the plan in a checkpoint."""
_MEANINGS = {
    "continue": "the rate stays at that of the last step of the old schedule",
    "restart": "a new schedule over the steps that are left",
    "stretch": "the schedule as if the run had had this length from its start",
}


def plan_schedules(recipe: Recipe, num_steps: int, checkpoint: Path | None) -> tuple[SchedulePlan, str | None]:
    """Return the schedules for `num_steps`, and a line to print if the length of the run changed.

    Raises RunError if the earlier schedule is finished and the config does not set `train.extend_schedule`.
    """
    if checkpoint is None:
        return SchedulePlan.initial(num_steps), None
    meta = read_meta(checkpoint)
    kept, done = meta["extra"].get(KEY), meta["step"]
    before = SchedulePlan.initial(num_steps) if kept is None else SchedulePlan.from_json(kept)
    if before.num_steps == num_steps:
        return before, None
    how = recipe.train.extend_schedule
    stretched = before.extended(done, num_steps, "stretch")
    if not differ(recipe.lr_scheduler, before.extended(done, num_steps, "continue"), stretched, done):
        return stretched, None
    if how is None and done >= before.num_steps:
        choices = "; ".join(f"{name}: {meaning}" for name, meaning in _MEANINGS.items())
        raise RunError(
            f"train.extend_schedule must be set, because the learning-rate schedule ended at step {before.num_steps} "
            f"and the run resumes to step {num_steps}. {choices}",
            code="missing_key",
            keys=("train.extend_schedule", "train.max_steps"),
            fix="train.extend_schedule=restart, or train.extend_schedule=continue, or train.extend_schedule=stretch",
        )
    chosen = how or "stretch"
    text = f"{chosen} ({_MEANINGS[chosen]}): {before.num_steps} steps before, {num_steps} now"
    return before.extended(done, num_steps, chosen), text


def needs_choice(recipe: Recipe, plan: SchedulePlan, num_steps: int) -> bool:
    """Return whether a finished run needs a choice of its schedule up to `num_steps`."""
    done = plan.num_steps
    one, other = (plan.extended(done, num_steps, how) for how in ("continue", "stretch"))
    return differ(recipe.lr_scheduler, one, other, done)
