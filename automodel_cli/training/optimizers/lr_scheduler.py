"""Learning-rate schedules in closed form: the learning rate of step s depends on s only, not on earlier steps.

Steps are counted from 0: s is the number of optimizer steps done, N the number of the run, w of the warm-up. Warm-up is
`(s + 1) / (w + 1)`, so the first step already trains and the peak is reached exactly at s = w. What follows is a
function of the progress `(s - w) / (N - w)`, which would be 1 one step after the last, so the last step still trains
when `min_lr_ratio` is 0. Torch-free: a schedule only writes `lr` into the optimizer's groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_choice, check_range

if TYPE_CHECKING:
    import torch


class LRSchedule(Protocol):
    """Methods that the loop and the checkpoint use. torch's schedulers have them too."""

    def step(self) -> None: ...
    def get_last_lr(self) -> list[Any]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


class ScheduleNode(Protocol):
    """Interface of the `lr_scheduler` section, unless it is a `_partial_` of `torch.optim.lr_scheduler`. Custom
    schedules: examples/own_schedule.py."""

    def build(self, optimizer: torch.optim.Optimizer, num_steps: int) -> LRSchedule:
        """Build the schedule of a run with `num_steps`. `ClosedFormLR` converts a function of the step."""
        ...


class ClosedFormLR:
    """Sets `lr = peak * factor(step)` in every group of an optimizer; the peak is the group's `lr` at construction.

    The state is the step only. Peaks come from the config, so a changed `optimizer.lr` takes effect after a resume.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float]):
        self._optimizer, self._factor, self._step = optimizer, factor, 0
        # Groups keep their ratio: every group is its own peak times the same factor.
        self._peaks = [group["lr"] for group in optimizer.param_groups]
        self._apply()

    @property
    def factor(self) -> Callable[[int], float]:
        """The share of the peak as a function of the step."""
        return self._factor

    def _apply(self) -> None:
        factor = self._factor(self._step)
        for group, peak in zip(self._optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor

    def step(self) -> None:
        """Call after each optimizer step."""
        self._step += 1
        self._apply()

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group that the next optimizer step uses."""
        return [group["lr"] for group in self._optimizer.param_groups]

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._step = state_dict["step"]
        self._apply()


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def _linear(progress: float) -> float:
    return 1 - progress


def _one_minus_sqrt(progress: float) -> float:
    return 1 - math.sqrt(progress)


_DECAYS = {"cosine": _cosine, "linear": _linear, "1-sqrt": _one_minus_sqrt}


def _check_ratio(name: str, value: float | None) -> None:
    check_range(name, value, at_least=0, at_most=1, fix=f"lr_scheduler.{name}=0.1")


@dataclass(frozen=True)
class _Warmup:
    """Warmup in steps or as a fraction of the run. Set at most one of them."""

    warmup_steps: int | None = None
    """Steps of linear warmup."""
    warmup_ratio: float | None = None
    """Fraction of the run's steps with linear warmup, instead of `warmup_steps`."""

    def __post_init__(self) -> None:
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ConfigError(
                f"warmup_steps={self.warmup_steps} and warmup_ratio={self.warmup_ratio} cannot both be set",
                code="mutually_exclusive",
                keys=("warmup_steps", "warmup_ratio"),
                fix="lr_scheduler.warmup_ratio=null",
            )
        check_range("warmup_steps", self.warmup_steps, at_least=0, fix="lr_scheduler.warmup_steps=0")
        _check_ratio("warmup_ratio", self.warmup_ratio)

    def num_warmup_steps(self, num_steps: int) -> int:
        """Warm-up steps of a run of `num_steps`. Raises ConfigError when the run would end inside the warm-up."""
        if self.warmup_steps is not None:
            warmup = self.warmup_steps
        else:
            warmup = round((self.warmup_ratio or 0.0) * num_steps)
        if warmup and warmup >= num_steps:
            key = "warmup_steps" if self.warmup_steps is not None else "warmup_ratio"
            raise ConfigError(
                f"the warm-up of {warmup} steps must be shorter than the run of {num_steps} steps",
                code="out_of_range",
                keys=(key,),
                fix=f"lr_scheduler.{key}={num_steps // 10 if self.warmup_steps is not None else 0.1}",
            )
        return warmup

    def factor(self, step: int, num_steps: int) -> float:
        """Share of the peak learning rate used by optimizer step `step` (counted from 0)."""
        warmup = self.num_warmup_steps(num_steps)
        if step < warmup:
            # Warm-up of 3 steps: 0.25, 0.5, 0.75, and 1 at step 3. The first step is not 0, which would be a step
            # without training.
            return (step + 1) / (warmup + 1)
        return self._after_warmup(step, warmup, num_steps)

    def _after_warmup(self, step: int, warmup: int, num_steps: int) -> float:
        raise NotImplementedError

    def build(self, optimizer: torch.optim.Optimizer, num_steps: int) -> ClosedFormLR:
        """Build the schedule for every group of `optimizer` and a run of `num_steps`. Call `step()` after each step."""
        self.num_warmup_steps(num_steps)
        # A run of 13 steps with `Linear`, warm-up 3 and min_lr_ratio 0.1: 0.25 0.5 0.75 1 0.91 0.82 ... 0.19. The value
        # 0.1 would be that of step 13, the first one after the run.
        return ClosedFormLR(optimizer, lambda step: self.factor(min(step, num_steps), num_steps))


@dataclass(frozen=True)
class Constant(_Warmup):
    """The peak learning rate from the end of the warm-up to the end of the run."""

    def _after_warmup(self, step: int, warmup: int, num_steps: int) -> float:
        return 1.0


@dataclass(frozen=True)
class _Decay(_Warmup):
    min_lr_ratio: float = 0.0
    """Final learning rate as a fraction of the peak."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_ratio("min_lr_ratio", self.min_lr_ratio)

    def _scaled(self, share: float) -> float:
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * share


@dataclass(frozen=True)
class Cosine(_Decay):
    """Half a cosine from the peak to `min_lr_ratio` of it (Loshchilov and Hutter 2017, arXiv:1608.03983, without
    restarts).
    """

    def _after_warmup(self, step: int, warmup: int, num_steps: int) -> float:
        return self._scaled(_cosine((step - warmup) / (num_steps - warmup)))


@dataclass(frozen=True)
class Linear(_Decay):
    """A straight line from the peak to `min_lr_ratio` of it."""

    def _after_warmup(self, step: int, warmup: int, num_steps: int) -> float:
        return self._scaled(_linear((step - warmup) / (num_steps - warmup)))


@dataclass(frozen=True)
class WSD(_Decay):
    """Warm-up, stable, decay (Hu et al. 2024, arXiv:2404.06395): the peak is held, then left in the last part.

    The decay lasts `decay_steps`, or `decay_ratio` of the run if that is not set, and has the shape `decay`. "1-sqrt"
    is from Haegele et al. 2024, arXiv:2405.18392.
    """

    decay: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """Shape of the decay at the end. `1-sqrt` is from arXiv:2405.18392."""
    decay_ratio: float = 0.2
    """Fraction of the run's steps in the decay phase."""
    decay_steps: int | None = None
    """Steps of the decay phase, instead of `decay_ratio`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_ratio("decay_ratio", self.decay_ratio)
        check_choice("decay", self.decay, _DECAYS, fix="lr_scheduler.decay=linear")
        check_range("decay_steps", self.decay_steps, at_least=0, fix="lr_scheduler.decay_steps=100")

    def num_warmup_steps(self, num_steps: int) -> int:
        warmup, decay = super().num_warmup_steps(num_steps), self._num_decay_steps(num_steps)
        if warmup + decay > num_steps:
            raise ConfigError(
                f"{warmup} warm-up steps and {decay} decay steps exceed the {num_steps} steps of the run",
                code="out_of_range",
                keys=("decay_steps",) if self.decay_steps is not None else ("decay_ratio",),
                fix=f"lr_scheduler.decay_steps={num_steps - warmup}",
            )
        return warmup

    def _num_decay_steps(self, num_steps: int) -> int:
        return self.decay_steps if self.decay_steps is not None else round(self.decay_ratio * num_steps)

    def _after_warmup(self, step: int, warmup: int, num_steps: int) -> float:
        decay_steps = self._num_decay_steps(num_steps)
        # 20 steps with decay_ratio 0.2: the peak up to step 16, then 0.75, 0.5, 0.25.
        done = step - (num_steps - decay_steps)
        if done <= 0:
            return 1.0
        return self._scaled(_DECAYS[self.decay](done / decay_steps))


def build_lr_scheduler(
    node: Any, optimizer: torch.optim.Optimizer, num_steps: int, factor: Callable[[int], float] | None = None
) -> LRSchedule:
    """A schedule from one of the nodes above, or from a `_partial_` of `torch.optim.lr_scheduler` (called with the
    optimizer). `factor`: the share of the peak as a function of the step, in place of the node's own.
    """
    if factor is not None:
        return ClosedFormLR(optimizer, factor)
    if hasattr(node, "build"):
        schedule: LRSchedule = node.build(optimizer, num_steps)
        return schedule
    if callable(node):
        made: LRSchedule = node(optimizer)
        return made
    raise ConfigError(
        f"lr_scheduler={node!r} must be a class with `build(optimizer, num_steps)`, or a target with `_partial_: true`",
        code="wrong_type",
        keys=("lr_scheduler",),
        fix="lr_scheduler._target_=automodel_cli.training.optimizers.lr_scheduler.Cosine",
    )
