"""Results of rank 0 on all ranks, over a group of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from automodel_cli.config.errors import RunError

T = TypeVar("T")


class RankZero:
    """A gloo group of all ranks, so that an asynchronous save cannot interleave with the collectives of a training
    step. Without a process group, the only rank is 0. The constructor and `call` are collective."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1

    def call(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0. Every rank returns its result or raises its RunError."""
        if self.group is None:
            return make()
        outcome: list[list[T] | RunError] = [[]]
        if self.rank == 0:
            try:
                outcome = [[make()]]
            except RunError as error:
                outcome = [error]
        dist.broadcast_object_list(outcome, src=0, group=self.group, device=torch.device("cpu"))
        if isinstance(outcome[0], RunError):
            raise outcome[0]
        return outcome[0][0]
