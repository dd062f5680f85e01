"""What a strategy of data parallelism asks of the axes that are applied before it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class AxisOptions:
    """How a strategy wants the axes that are applied before it.

    `tp_plan`: tensor-parallel styles by module name, null for the model's own. `ring`: attention passes keys and values
    around instead of gathering them. `expert_dispatch`: "all_to_all" or "deepep".
    """

    tp_plan: Any = None
    sequence_parallel: bool = False
    async_tensor_parallel: bool = False
    ring: bool = False
    expert_dispatch: str = "all_to_all"
