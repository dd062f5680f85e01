"""Supervised fine-tuning on text and pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from automodel_cli.recipes.sft import SFTRecipe
from automodel_cli.run.checks.vision_checks import check_vision

if TYPE_CHECKING:
    from automodel_cli.config.compose import Composed


@dataclass(frozen=True, kw_only=True)
class VLMRecipe(SFTRecipe):
    """Train a vision-language model on rows with pictures, and export the whole model."""

    kind: ClassVar[str] = "vlm"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_vision(self.model, self.data, self.validation, self.parallelizer)

    def prepared(self, tokenizer: Any) -> Any:
        from automodel_cli.data.pictures.reader import PictureSupport
        from automodel_cli.data.pictures.rows import PictureRows
        from automodel_cli.data.preparation.pipeline import prepare_data
        from automodel_cli.models.hub.source import composite_config, stop_ids
        from automodel_cli.models.vision.probe import probe_pictures
        from automodel_cli.models.vision.processor import picture_processor
        from automodel_cli.run.checks.token_ids import check_prepared
        from automodel_cli.run.tower_cost import image_token_cost

        processor = picture_processor(self.model, tokenizer)
        if tokenizer.chat_template is None:  # repositories may store it with the processor only
            tokenizer.chat_template = getattr(processor.processor, "chat_template", None)
        probe_pictures(composite_config(self.model), processor)
        rows = PictureRows(self.data.media_dir or _folder_of(self.data.path), self.data.max_image_pixels)
        assert self.model.vision is not None, "`check_vision` requires it"
        support = PictureSupport(
            rows,
            processor,
            self.data.picture_memory_gib * 2**30,
            image_token_cost(composite_config(self.model), self.model.vision, processor),
        )
        found = prepare_data(self.data, tokenizer, seed=self.seed, stop_ids=stop_ids(self.model), pictures=support)
        check_prepared(found, tokenizer, self.model)
        return found

    def run(self, source: Composed) -> int:
        from automodel_cli.run.picture_accuracy import PictureAccuracy
        from automodel_cli.run.picture_answers import PictureAnswers
        from automodel_cli.run.startup_summary import show_header
        from automodel_cli.run.trainer import build_trainer
        from automodel_cli.run.validation_loss import HeldOutLoss

        with build_trainer(self, source) as session:
            accuracy = PictureAccuracy(session)
            session.callbacks.add(HeldOutLoss(session))
            session.callbacks.add(accuracy)
            show_header(session)
            answers = PictureAnswers(session)
            if session.first_step == 0:
                answers.ask("before")
            session.validate_if_due(session.first_step)
            for step, batches in session.steps():
                session.train(step, batches)
            if session.stopped_by:
                return session.exit_code()
            accuracy.show(session.last_step)
            answers.ask("after")

            from automodel_cli.run.finalize import finalize_run

            return finalize_run(session, answers.accuracy)


def _folder_of(path: str | None) -> str:
    """Return the folder of a local file or folder of rows, else the working directory."""
    if path is None or not Path(path).exists():
        return ""
    return str(path if Path(path).is_dir() else Path(path).parent)
