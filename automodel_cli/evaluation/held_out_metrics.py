"""Base of validations that print their metrics before and after training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from automodel_cli.data.batch import Batch
from automodel_cli.data.preparation.dataloader import eval_batches
from automodel_cli.training.callback import Callback

if TYPE_CHECKING:
    from automodel_cli.run.trainer import Trainer


class HeldOutMetrics(Callback):
    """Validation of a recipe without a language head. `shown`: metric -> its name when printed."""

    shown: ClassVar[Mapping[str, str]]
    unit: ClassVar[tuple[str, str]]
    """Metric with the number of examples, and what they are."""

    def __init__(self, session: Trainer):
        self._session = session

    def about(self) -> list[tuple[str, str]]:
        """Return rows of the startup summary."""
        return []

    def batches(self) -> list[Batch]:
        """Return the held-out rows of this rank."""
        session = self._session
        assert session.data.validation is not None
        return eval_batches(
            session.data.validation,
            microbatch_size=session.recipe.train.microbatch_size,
            dp_rank=session.mesh.dp_rank,
            dp_size=session.mesh.dp_size,
            num_batches=session.recipe.validation.num_batches,
        )

    def show(self, when: str, step: int) -> None:
        """Print the metrics on held-out rows. Validate first if this step has no result. Collective."""
        if self._session.last_validation[0] != step:
            self._session.validate(step)
        measured = self._session.last_validation[1]
        numbers = [f"{words} {measured[f'val_{n}']:.4g}" for n, words in self.shown.items() if f"val_{n}" in measured]
        if numbers:
            metric, words = self.unit
            self._session.meter.print(f"{when} training, {measured[f'val_{metric}']:.0f} {words}: {', '.join(numbers)}")
