"""The section of multi-token prediction. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from automodel_cli.config.value_checks import check_range

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class MTPConfig:
    """Training of multi-token-prediction layers (DeepSeek-V3, arXiv:2412.19437, section 2.2; docs/methods/mtp.md)."""

    loss_weight: float = 0.1
    """Weight of the MTP loss (the mean cross entropy over depths) in the loss. DeepSeek-V3: 0.3, then 0.1."""
    depths: int | None = None
    """Number of MTP depths of a model with random weights. null: as its config sets. A checkpoint keeps its own
    number."""

    def __post_init__(self) -> None:
        check_range(
            "loss_weight",
            self.loss_weight,
            above=0,
            note=", or the layers would not be trained",
            fix="model.mtp.loss_weight=0.1, or model.mtp=null",
        )
        check_range("depths", self.depths, at_least=1, fix="model.mtp.depths=1")
