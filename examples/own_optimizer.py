"""An optimizer of your own: the sign of a momentum (Lion, arXiv:2302.06675), on sharded parameters too.

    automodel finetune llm -c quickstart \
        optimizer='{_target_: own_optimizer.Lion, lr: 1e-4}' --trust-package own_optimizer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from automodel_cli.training.optimizers.param_groups import decay_groups, require_trainable


@dataclass(frozen=True)
class Lion:
    """`betas`: of the momentum that is stepped along and of the one that is kept. `weight_decay` of matrices only."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def build(self, parts: Sequence[nn.Module]) -> torch.optim.Optimizer:
        return SignOfMomentum(decay_groups(require_trainable(parts), self.weight_decay), lr=self.lr, betas=self.betas)


class SignOfMomentum(torch.optim.Optimizer):
    def __init__(self, groups: Any, *, lr: float, betas: tuple[float, float]):
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            along, kept = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["momentum"] = torch.zeros_like(param)
                momentum = state["momentum"]
                update = momentum.lerp(param.grad, 1 - along).sign()
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
                momentum.lerp_(param.grad, 1 - kept)
