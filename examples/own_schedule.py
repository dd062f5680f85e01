"""A learning-rate schedule of your own: constant, and divided by ten at milestones of the run.

    automodel finetune llm -c quickstart \
        lr_scheduler='{_target_: own_schedule.Milestones, at: [0.5, 0.75]}' --trust-package own_schedule
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from automodel_cli.config.errors import ConfigError
from automodel_cli.training.optimizers.lr_scheduler import ClosedFormLR, LRSchedule


@dataclass(frozen=True)
class Milestones:
    """`at`: shares of the run's steps after which the rate is multiplied by `factor`."""

    at: tuple[float, ...] = (0.5, 0.75)
    factor: float = 0.1

    def __post_init__(self) -> None:
        if not all(0 < share < 1 for share in self.at):
            raise ConfigError(f"at={list(self.at)} must be between 0 and 1", keys=("at",), fix="at=[0.5]")

    def build(self, optimizer: torch.optim.Optimizer, num_steps: int) -> LRSchedule:
        return ClosedFormLR(optimizer, lambda step: self.factor ** sum(step >= share * num_steps for share in self.at))
