"""The section of mixtures of experts. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from automodel_cli.config.value_checks import check_range

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class MoEConfig:
    """Mixtures of experts. `models/moe/load_balancing.py` has the formulas.

    The load-balancing loss and the update of the selection bias are off by default, because fine-tuning should not
    change the balance of the experts unless requested.
    """

    experts_implementation: Literal["grouped_mm", "eager"] = "grouped_mm"
    """Expert implementation: `grouped_mm` is one grouped GEMM, `eager` a loop over experts."""
    aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss. 0: disabled."""
    bias_update_rate: float = 0.0
    """Step size of the routers' selection bias, if they have one (DeepSeek-V3: 0.001). 0: the bias is constant."""

    def __post_init__(self) -> None:
        for name in ("aux_loss_coef", "bias_update_rate"):
            check_range(name, getattr(self, name), at_least=0, fix=f"model.moe.{name}=0")
