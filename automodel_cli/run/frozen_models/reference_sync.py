"""Config of periodic reference-model updates from the policy. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_range

if TYPE_CHECKING:
    from automodel_cli.distributed.strategies.base import Strategy
    from automodel_cli.models.config import ModelConfig


@dataclass(frozen=True)
class ReferenceSync:
    """After every `every_steps` steps the reference becomes `mixup_alpha` x policy + (1 - `mixup_alpha`) x reference,
    weight by weight
    (TR-DPO, arXiv:2404.09656): at 1 the policy itself, below it somewhat nearer to the policy. The reference is then a
    frozen copy, and in every checkpoint.
    """

    every_steps: int
    """Steps between updates of the reference (TR-DPO, arXiv:2404.09656)."""
    mixup_alpha: float = 1.0
    """Weight of the policy in the new reference. 1: a copy of the policy."""

    def __post_init__(self) -> None:
        check_range("every_steps", self.every_steps, at_least=1, fix="every_steps=1")
        check_range("mixup_alpha", self.mixup_alpha, above=0, at_most=1, fix="mixup_alpha=1.0")

    def due(self, step: int) -> bool:
        """Whether the reference changes after `step` steps."""
        return step % self.every_steps == 0


def check_reference_update(
    model: ModelConfig, parallelizer: Strategy, update: ReferenceSync | None, *, has_reference: bool
) -> None:
    """Raise ConfigError if the reference model cannot be updated as `update` configures."""
    if update is None:
        return
    off = "reference_sync=null"
    if not has_reference:
        raise ConfigError(
            "reference_sync has no effect, because the objective uses no reference model",
            code="no_effect",
            keys=("reference_sync", "objective"),
            fix=off,
        )
    if model.lora is not None and update.mixup_alpha < 1:
        raise ConfigError(
            f"reference_sync.mixup_alpha={update.mixup_alpha} is not supported with model.lora, because interpolated "
            "LoRA factors do not give interpolated weights",
            code="unsupported_combination",
            keys=("reference_sync.mixup_alpha", "model.lora"),
            fix="reference_sync.mixup_alpha=1.0",
        )
    if "sampler" not in parallelizer.supports:
        raise ConfigError(
            f"reference_sync is not supported with parallelizer={parallelizer.name}, because in-place updates of the "
            "sharded reference are untested",
            code="unsupported_combination",
            keys=("reference_sync", "parallelizer"),
            fix=f"parallelizer=fsdp2, or {off}",
        )
