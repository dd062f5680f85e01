"""A reference that follows the policy: the config of it. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from automodel_cli.config.errors import ConfigError

if TYPE_CHECKING:
    from automodel_cli.distributed.strategies.base import Strategy
    from automodel_cli.models.config import ModelConfig


@dataclass(frozen=True)
class ReferenceUpdate:
    """After every `every` steps the reference becomes `alpha` x policy + (1 - `alpha`) x reference, weight by weight
    (TR-DPO, arXiv:2404.09656): at 1 the policy itself, below it somewhat nearer to the policy. The reference is then a
    frozen copy, and in every checkpoint.
    """

    every: int
    """Steps between updates of the reference (TR-DPO, arXiv:2404.09656)."""
    alpha: float = 1.0
    """Weight of the policy in the new reference, parameter by parameter. 1: the policy itself."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"every={self.every} must be at least 1", keys=("every",), fix="every=1")
        if not 0 < self.alpha <= 1:
            raise ConfigError(f"alpha={self.alpha} must be above 0 and at most 1", keys=("alpha",), fix="alpha=1.0")

    def due(self, step: int) -> bool:
        """Whether the reference changes after `step` steps."""
        return step % self.every == 0


def check_reference_update(
    model: ModelConfig, parallelizer: Strategy, update: ReferenceUpdate | None, *, has_reference: bool
) -> None:
    """What a reference cannot follow. Raises ConfigError."""
    if update is None:
        return
    off = "reference_update=null"
    if not has_reference:
        raise ConfigError(
            "this objective compares with no reference, so there is none to update",
            keys=("reference_update", "objective"),
            fix=off,
        )
    if model.lora is not None and update.alpha < 1:
        raise ConfigError(
            f"reference_update.alpha={update.alpha} mixes weights, but an adapter's are factors, and a mix of "
            "factors is no mix of what they make",
            keys=("reference_update.alpha", "model.lora"),
            fix="reference_update.alpha=1.0",
        )
    if "sampler" not in parallelizer.supports:
        raise ConfigError(
            f"reference_update writes to the reference's weights where they are, which has not been tried as "
            f"{parallelizer.name} shards them",
            keys=("reference_update", "parallelizer"),
            fix=f"parallelizer=fsdp2, or {off}",
        )
