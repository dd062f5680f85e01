"""Distillation: rows from a dataset, and what a teacher says of each of their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from automodel_cli.models.config import TeacherConfig
from automodel_cli.objectives.distillation import Distillation
from automodel_cli.run.recipe import Recipe

if TYPE_CHECKING:
    from automodel_cli.config.compose import Composed
    from automodel_cli.run.session import Columns, Session


@dataclass(frozen=True, kw_only=True)
class KDRecipe(Recipe):
    """The whole story: prepare rows, ask the teacher at each step, train, export the student."""

    objective: Distillation
    teacher: TeacherConfig
    """The model that is learnt from: frozen, sharded like the student, with the same tokens."""

    kind: ClassVar[str] = "kd"

    def run(self, source: Composed) -> int:
        from automodel_cli.rollout.held_out_questions import HeldOutQuestions
        from automodel_cli.run.held_out import HeldOutLoss
        from automodel_cli.run.session import open_session

        with open_session(self, source, columns=self.columns) as session:
            session.callbacks.add(HeldOutLoss(session))
            session.header()
            questions = HeldOutQuestions()
            questions.ask(session, "before")
            session.validate_if_due(session.first_step)
            for step, batches in session.steps():
                session.train(step, batches)
            if session.stopped_by:
                return session.exit_code()
            questions.ask(session, "after")

            from automodel_cli.run.results import finish  # later: the first step should not wait for the last page

            return finish(session, questions.accuracy)

    def columns(self, session: Session) -> Columns:
        """The teacher's likeliest tokens in place of each label. Collective."""
        from automodel_cli.run.teacher import build_teacher, taught

        stages = build_teacher(session, self.teacher).stages
        return lambda batches: taught(stages, batches, self.objective.top_k, session.mesh.device)
