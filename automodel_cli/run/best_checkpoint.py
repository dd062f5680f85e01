"""Best checkpoint of a run: track the validation metric, and load its weights at the end."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from automodel_cli.config.errors import RunError
from automodel_cli.training.checkpoint.checkpointer import Checkpointer, Resumed
from automodel_cli.training.checkpoint.directory import step_of
from automodel_cli.training.early_stopping import LOSS, EarlyStop, Goal


def count_validation(early_stop: EarlyStop, step: int, metrics: Mapping[str, float]) -> None:
    """Pass the metrics of rank 0 to early stopping. Collective. Raises RunError if the metric is missing."""
    goal, patience = early_stop.goal, early_stop.patience
    if goal.metric not in metrics and (goal != Goal() or patience is not None):
        near = difflib.get_close_matches(goal.metric, metrics, 1, 0.0)
        raise RunError(
            f"validation.metric={goal.metric} is not measured; it must be one of: {', '.join(metrics)}",
            code="unknown_name",
            keys=("validation.metric",),
            fix=f"validation.metric={near[0] if near else LOSS}",
        )
    value: list[float | None] = [metrics.get(goal.metric)]
    dist.broadcast_object_list(value, src=0, device=torch.device("cpu"))
    early_stop.add(step, value[0])


def load_best(checkpointer: Checkpointer, parts: Sequence[nn.Module], last_step: int) -> Resumed | None:
    """Load the weights of the best checkpoint. Collective.

    Return None if the best checkpoint is the one of the last step, or if there is none.
    """
    checkpointer.wait()
    best = checkpointer.best()
    return None if best is None or step_of(best) == last_step else checkpointer.load(best, parts)
