"""A reference that follows the policy: the config of it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from automodel_cli.config.errors import ConfigError

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
        if self.every_steps < 1:
            raise ConfigError(
                f"every_steps={self.every_steps} must be at least 1", keys=("every_steps",), fix="every_steps=1"
            )
        if not 0 < self.mixup_alpha <= 1:
            raise ConfigError(
                f"mixup_alpha={self.mixup_alpha} must be above 0 and at most 1",
                keys=("mixup_alpha",),
                fix="mixup_alpha=1.0",
            )

    def due(self, step: int) -> bool:
        """Whether the reference changes after `step` steps."""
        return step % self.every_steps == 0


def check_reference_update(
    model: ModelConfig, parallelizer: Strategy, update: ReferenceSync | None, *, has_reference: bool
) -> None:
    """What a reference cannot follow. Raises ConfigError."""
    if update is None:
        return
    off = "reference_sync=null"
    if not has_reference:
        raise ConfigError(
            "this objective compares with no reference, so there is none to update",
            keys=("reference_sync", "objective"),
            fix=off,
        )
    if model.lora is not None and update.mixup_alpha < 1:
        raise ConfigError(
            f"reference_sync.mixup_alpha={update.mixup_alpha} mixes weights, but an adapter's are factors, and a "
            "mix of "
            "factors is no mix of what they make",
            keys=("reference_sync.mixup_alpha", "model.lora"),
            fix="reference_sync.mixup_alpha=1.0",
        )
    if "sampler" not in parallelizer.supports:
        raise ConfigError(
            f"reference_sync writes to the reference's weights where they are, which has not been tried as "
            f"{parallelizer.name} shards them",
            keys=("reference_sync", "parallelizer"),
            fix=f"parallelizer=fsdp2, or {off}",
        )
