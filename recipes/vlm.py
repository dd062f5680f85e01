"""Supervised fine-tuning on text and pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from automodel_cli.recipes.sft import SFTRecipe

if TYPE_CHECKING:
    from automodel_cli.config.composition.compose import Composed


@dataclass(frozen=True, kw_only=True)
class VLMRecipe(SFTRecipe):
    """Train a vision-language model on rows with pictures, and export the whole model."""

    kind: ClassVar[str] = "vlm"
    reads_pictures: ClassVar[bool] = True

    def run(self, source: Composed) -> int:
        from automodel_cli.evaluation.validation import add_tasks
        from automodel_cli.run.build_trainer import build_trainer
        from automodel_cli.run.fake_quantization import FakeQuantizationRun
        from automodel_cli.run.pictures.accuracy import PictureAccuracy
        from automodel_cli.run.pictures.answers import PictureAnswers
        from automodel_cli.run.startup_summary import show_header
        from automodel_cli.run.validation_loss import HeldOutLoss

        with build_trainer(self, source) as session:
            accuracy = PictureAccuracy(session)
            held_out = HeldOutLoss(session)
            session.callbacks.add(held_out)
            quantization = FakeQuantizationRun.added_to(session, held_out)
            session.callbacks.add(accuracy)
            add_tasks(session)
            show_header(session)
            answers = PictureAnswers(session)
            if session.first_step == 0:
                answers.ask("before")
            if quantization is not None:
                quantization.measure("before")
            session.validate_if_due(session.first_step)
            for step, batches in session.steps():
                session.train(step, batches)
            if session.stopped_by:
                return session.exit_code()
            accuracy.show(session.last_step)
            answers.ask("after")
            if quantization is not None:
                quantization.measure("after")

            from automodel_cli.run.finalize import finalize_run

            return finalize_run(session, answers.accuracy, {} if quantization is None else quantization.numbers)
