"""Learning-rate schedule of each step, also after a run was resumed with another number of steps.

A plan is a list of spans with one schedule each: `first` step (counted from 0) and `length`. Most plans have one
span. Torch-free at import.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from automodel_cli.training.optimizers.lr_scheduler import ClosedFormLR

ExtendSchedule = Literal["continue", "restart", "stretch"]
_SAMPLES = 100


class ScheduleSpan(NamedTuple):
    """A schedule of `length` steps that begins at step `first`."""

    first: int
    length: int


@dataclass(frozen=True)
class SchedulePlan:
    """The spans of a run of `num_steps`. Steps after the last span have the rate of its last step."""

    spans: tuple[ScheduleSpan, ...]
    num_steps: int

    @classmethod
    def initial(cls, num_steps: int) -> SchedulePlan:
        """Return the plan of a run that was never extended."""
        return cls((ScheduleSpan(0, num_steps),), num_steps)

    # Example: a run of 10 steps is extended to 15. stretch: one schedule over 15 steps. continue: steps 10 to 14 keep
    # the rate of step 9. restart: a second schedule over steps 10 to 14, with its own warm-up.
    def extended(self, done: int, num_steps: int, how: ExtendSchedule) -> SchedulePlan:
        """Return the plan of a run that continues after `done` steps and ends after `num_steps`."""
        if how == "stretch":
            return SchedulePlan.initial(num_steps)
        if how == "continue" or num_steps <= done:
            return SchedulePlan(self.spans, num_steps)
        before = tuple(span for span in self.spans if span.first < done)
        return SchedulePlan((*before, ScheduleSpan(done, num_steps - done)), num_steps)

    def place(self, step: int) -> tuple[int, int]:
        """Return the index of the span of `step`, and the step within it."""
        number = max(i for i, span in enumerate(self.spans) if span.first <= step or i == 0)
        span = self.spans[number]
        goes_on = span.first + span.length < self.num_steps
        # A schedule in closed form is 0 after its last step for most decays. An extended run must not train with that
        # rate.
        return number, min(step - span.first, span.length - 1 if goes_on else span.length)

    def as_json(self) -> dict[str, object]:
        """Return JSON values that `from_json` reads."""
        return {"spans": [list(span) for span in self.spans], "num_steps": self.num_steps}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> SchedulePlan:
        """Read the result of `as_json`."""
        return cls(tuple(ScheduleSpan(*span) for span in values["spans"]), values["num_steps"])


def factor_of(node: object, plan: SchedulePlan) -> Callable[[int], float] | None:
    """Return the fraction of the peak rate as a function of the step, or None for a schedule not in closed form."""
    import torch

    factors: list[Callable[[int], float]] = []
    for span in plan.spans:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        made = node.build(optimizer, span.length) if hasattr(node, "build") else None
        if not isinstance(made, ClosedFormLR):
            return None
        factors.append(made.factor)

    def factor(step: int) -> float:
        number, within = plan.place(step)
        return factors[number](within)

    return factor


def extended_factor(node: object, plan: SchedulePlan) -> Callable[[int], float] | None:
    """Return `factor_of` for an extended run, or None for any other run, whose node builds the schedule."""
    return None if plan == SchedulePlan.initial(plan.num_steps) else factor_of(node, plan)


def differ(node: object, one: SchedulePlan, other: SchedulePlan, done: int) -> bool:
    """Return whether two plans differ after `done` steps. False for schedules not in closed form."""
    first, second = factor_of(node, one), factor_of(node, other)
    if first is None or second is None:
        return False
    left = range(done, other.num_steps)
    steps = {*left[:: max(1, len(left) // _SAMPLES)], *left[-1:]}
    return any(abs(first(step) - second(step)) > 1e-9 for step in steps)
