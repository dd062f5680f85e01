"""Which of two validations is better, and when a run ends because none is. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TypedDict

LOSS = "val_loss"


@dataclass(frozen=True)
class Goal:
    """The measure that decides which checkpoint is the best."""

    metric: str = LOSS
    maximize: bool = False

    def better(self, value: float | None, than: float | None) -> bool:
        """Return whether `value` is better. A number is better than None, and NaN counts as None."""
        if value is None or math.isnan(value):
            return False
        if than is None or math.isnan(than):
            return True
        return value > than if self.maximize else value < than


class EarlyStopState(TypedDict):
    """The count in a checkpoint. `metric` is the one that was counted."""

    metric: str
    best: float | None
    best_step: int | None
    waited: int


@dataclass
class EarlyStop:
    """The best validation so far, and the number of validations after it. `patience` None: the run never stops
    early."""

    goal: Goal
    patience: int | None
    best: float | None = None
    best_step: int | None = None
    waited: int = 0
    _improved: int | None = field(default=None, repr=False)

    def add(self, step: int, value: float | None) -> None:
        """Count the validation of `step`. The validation before the first step does not count."""
        if step == 0:
            return
        if self.goal.better(value, self.best):
            self.best, self.best_step, self.waited, self._improved = value, step, 0, step
        else:
            self.waited += 1

    def improved(self, step: int) -> bool:
        """Return whether a checkpoint of `step` has to be kept as the best one."""
        return self.patience is not None and self._improved == step

    @property
    def is_over(self) -> bool:
        """Whether the run ends."""
        return self.patience is not None and self.waited >= self.patience

    def state_dict(self) -> EarlyStopState:
        """Return JSON values for a checkpoint."""
        return {"metric": self.goal.metric, "best": self.best, "best_step": self.best_step, "waited": self.waited}

    def load_state_dict(self, state: EarlyStopState) -> None:
        """Restore the count. Another metric starts again."""
        if state["metric"] == self.goal.metric:
            self.best, self.best_step, self.waited = state["best"], state["best_step"], state["waited"]

    def __str__(self) -> str:
        validations = f"{self.waited} validation{'s' * (self.waited != 1)}"
        best = "" if self.best is None else f"; the best was {self.best:.4g} after step {self.best_step}"
        return f"{self.goal.metric} did not improve in {validations}{best}"
