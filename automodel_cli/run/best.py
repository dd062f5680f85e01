"""The best checkpoint of a run: what counts as an improvement, and its weights as what the run leaves."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from automodel_cli.config.errors import RunError
from automodel_cli.training.checkpoint_dir import step_of
from automodel_cli.training.early_stop import LOSS, Goal

if TYPE_CHECKING:
    from automodel_cli.run.session import Session


def count_validation(session: Session, step: int, metrics: Mapping[str, float]) -> None:
    """Let early stopping count what rank 0 measured. Collective. Raises RunError where the metric is missing."""
    goal, patience = session.early_stop.goal, session.early_stop.patience
    if goal.metric not in metrics and (goal != Goal() or patience is not None):
        near = difflib.get_close_matches(goal.metric, metrics, 1, 0.0)
        raise RunError(
            f"validation.metric={goal.metric} is not measured: a validation has {', '.join(metrics)}",
            keys=("validation.metric",),
            fix=f"validation.metric={near[0] if near else LOSS}",
        )
    value: list[Any] = [metrics.get(goal.metric)]
    dist.broadcast_object_list(value, src=0, device=torch.device("cpu"))
    session.early_stop.add(step, value[0])


def restore(session: Session) -> None:
    """Load the weights of the best checkpoint, which are what the run leaves. Collective."""
    session.checkpointer.wait()
    best = session.checkpointer.best()
    if best is None or step_of(best) == session.last_step:
        return
    with session.meter.pause(), session.watch.long("loading the best checkpoint"):
        loaded = session.checkpointer.load(best, session.model.parts)
    session.best_restored = loaded.step
    session.last_validation = session.last_step, loaded.metrics
    session.print(f"the weights are those of {best.name} again, the best by {session.early_stop.goal.metric}")


def ended_by(session: Session) -> str:
    """Return what ended the run, for its last lines."""
    if session.early_stop.is_over:
        key = f"validation.patience={session.early_stop.patience}"
        return f"by {key}, after step {session.last_step}: {session.early_stop}"
    limit = session.recipe.train.limit(session.loader.steps_per_epoch)
    return f"by {limit}, after step {session.last_step}"


def further(session: Session) -> str:
    """Return the overrides with which a resumed run trains on."""
    from automodel_cli.run.schedule import needs_choice

    if session.early_stop.is_over and session.last_step < session.num_steps:
        return "validation.patience=null"
    num_steps = 2 * session.num_steps
    choice = " train.extend_schedule=restart" if needs_choice(session.recipe, session.schedule, num_steps) else ""
    return f"train.max_steps={num_steps}{choice}" + (" validation.patience=null" if session.early_stop.is_over else "")
