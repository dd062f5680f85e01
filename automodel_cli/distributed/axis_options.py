"""Options that a data-parallel strategy sets for the axes that are applied before it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AxisOptions:
    """Options of tensor, context and expert parallelism.

    Attributes:
        tp_plan: tensor-parallel styles by module name. None: the plan of the model.
        ring: attention passes keys and values from rank to rank instead of gathering them.
        expert_dispatch: "all_to_all" or "deepep".
    """

    tp_plan: object = None
    sequence_parallel: bool = False
    async_tensor_parallel: bool = False
    ring: bool = False
    expert_dispatch: str = "all_to_all"
