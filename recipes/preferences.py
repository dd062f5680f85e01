"""Training on pairs or labeled responses: base class of preference optimization and reward models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from automodel_cli.data.formats.base import DataKind
from automodel_cli.evaluation.validation import check_tasks
from automodel_cli.objectives.base import PreferenceObjective
from automodel_cli.run.recipe import Recipe

if TYPE_CHECKING:
    from automodel_cli.config.composition.compose import Composed
    from automodel_cli.data.preparation.dataset import PackedDataset


@dataclass(frozen=True, kw_only=True)
class PreferenceRecipe(Recipe):
    """Prepare, train and export. Print the accuracy on held-out pairs before and after training."""

    objective: PreferenceObjective
    """Loss on preference data: `objective=dpo`, `kto`, `reward` and others."""

    data_kind: ClassVar[DataKind] = "preferences"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tasks(self)

    def about(self, rows: PackedDataset) -> list[tuple[str, str]]:
        """Rows of the startup summary: columns that this loss does not use, or lacks, and how pictures are read."""
        found = []
        if rows.pictures is not None:
            each = "microbatch" if rows.pictures.shares else "response, because its features cannot be repeated"
            found.append(("pictures", f"the tower reads a picture once for each {each}"))
        if rows.has_margins and "margins_P" not in self.objective.columns:
            reads = ": objective.margin=true does" if hasattr(self.objective, "margin") else ""
            found.append(("margins", f"the pairs have them, and this loss does not read them{reads}"))
        if "desirable_S" in self.objective.columns and len(kinds := rows.judgements) == 1:
            said = "good" if kinds == {1} else "bad"
            found.append(("labels", f"warning: all responses are judged {said}, so there is nothing to tell apart"))
        return found

    def run(self, source: Composed) -> int:
        from automodel_cli.evaluation.validation import add_tasks
        from automodel_cli.run.build_trainer import build_trainer
        from automodel_cli.run.pictures.answers import PictureAnswers
        from automodel_cli.run.startup_summary import show_header
        from automodel_cli.run.validation_loss import HeldOutLoss, print_accuracy

        with build_trainer(self, source) as session:
            session.callbacks.add(HeldOutLoss(session))
            add_tasks(session)
            show_header(session, self.about(session.data.train))
            answers = PictureAnswers(session)
            if session.first_step == 0:
                print_accuracy(session, "before", 0)
                answers.ask("before")
            for step, batches in session.steps():
                session.train(step, batches)
            if session.stopped_by:
                return session.exit_code()
            print_accuracy(session, "after", session.last_step)
            answers.ask("after")

            from automodel_cli.run.finalize import (
                finalize_run,  # later: the first step should not wait for the last page
            )

            return finalize_run(session, answers.accuracy)
