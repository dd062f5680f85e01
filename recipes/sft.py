"""Supervised fine-tuning: minimize the negative log-likelihood of label tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from automodel_cli.evaluation.validation import check_tasks
from automodel_cli.run.recipe import Recipe

if TYPE_CHECKING:
    from automodel_cli.config.composition.compose import Composed
    from automodel_cli.run.trainer import Trainer
    from automodel_cli.run.validation_loss import HeldOutLoss


@dataclass(frozen=True, kw_only=True)
class SFTRecipe(Recipe):
    """Prepare, train and export. `objective` is usually `automodel_cli.objectives.sft.SFT`."""

    kind: ClassVar[str] = "sft"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tasks(self)

    def run(self, source: Composed) -> int:
        from automodel_cli.evaluation.validation import add_tasks
        from automodel_cli.rollout.monitoring.heldout_accuracy import HeldOutQuestions
        from automodel_cli.run.build_trainer import build_trainer
        from automodel_cli.run.fake_quantization import FakeQuantizationRun
        from automodel_cli.run.startup_summary import show_header

        with build_trainer(self, source) as session:
            held_out = self.held_out_loss(session)
            session.callbacks.add(held_out)
            quantization = FakeQuantizationRun.added_to(session, held_out)
            add_tasks(session)
            show_header(session)
            questions = HeldOutQuestions()
            questions.ask(session, "before")
            if quantization is not None:
                quantization.measure("before")
            session.validate_if_due(session.first_step)
            for step, batches in session.steps():
                session.train(step, batches)
            if session.stopped_by:
                return session.exit_code()
            questions.ask(session, "after")
            if quantization is not None:
                quantization.measure("after")

            from automodel_cli.run.finalize import (
                finalize_run,  # later: the first step should not wait for the last page
            )

            return finalize_run(session, questions.accuracy, {} if quantization is None else quantization.numbers)

    def held_out_loss(self, session: Trainer) -> HeldOutLoss:
        """Return the callback that validates on held-out rows."""
        from automodel_cli.run.validation_loss import HeldOutLoss

        return HeldOutLoss(session)
