"""Supervised fine-tuning: rows from a dataset, the negative log-likelihood of their label tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from recipes.base import Recipe

if TYPE_CHECKING:
    from automodel_cli.config.compose import Composed


@dataclass(frozen=True, kw_only=True)
class SFTRecipe(Recipe):
    """The whole story: prepare, train, export. `objective` is usually `automodel_cli.objectives.sft.SFT`."""

    kind: ClassVar[str] = "sft"

    def run(self, source: Composed) -> int:
        from recipes.quiz import Quiz
        from recipes.session import open_session

        with open_session(self, source) as session:
            session.header()
            quiz = Quiz()
            quiz.ask(session, "before")
            session.validate_if_due(session.first_step)
            for step, batches in session.steps():
                session.train(step, batches)
            if session.stopped_by:
                return session.exit_code()
            quiz.ask(session, "after")

            from recipes.results import finish  # later: the first step should not wait for the last page

            return finish(session, quiz)
