"""Training on pairs or judged responses, as preference optimisation and reward models do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from automodel_cli.evaluation.validation import check_tasks
from automodel_cli.objectives.base import PreferenceObjective
from automodel_cli.run.recipe import Recipe

if TYPE_CHECKING:
    from automodel_cli.config.compose import Composed


@dataclass(frozen=True, kw_only=True)
class PreferenceRecipe(Recipe):
    """The whole story: prepare, train, export; how many held-out pairs are ranked rightly is told before and after."""

    objective: PreferenceObjective

    preferences: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tasks(self)

    def run(self, source: Composed) -> int:
        from automodel_cli.evaluation.validation import add_tasks
        from automodel_cli.run.held_out import HeldOutLoss, print_accuracy
        from automodel_cli.run.session import open_session

        with open_session(self, source) as session:
            session.callbacks.add(HeldOutLoss(session))
            add_tasks(session)
            session.header()
            if session.first_step == 0:
                print_accuracy(session, "before", 0)
            for step, batches in session.steps():
                session.train(step, batches)
            if session.stopped_by:
                return session.exit_code()
            print_accuracy(session, "after", session.num_steps)

            from automodel_cli.run.results import finish  # later: the first step should not wait for the last page

            return finish(session)
