"""Reward models: pairs from a dataset teach a score for whole conversations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.objectives.base import PreferenceObjective, request_of
from automodel_cli.run.recipe import Recipe

if TYPE_CHECKING:
    from automodel_cli.config.compose import Composed
    from automodel_cli.run.session import Columns, Session


@dataclass(frozen=True, kw_only=True)
class RMRecipe(Recipe):
    """The whole story: prepare pairs, train the model and its value head, export a sequence classifier."""

    objective: PreferenceObjective

    kind: ClassVar[str] = "rm"
    preferences: ClassVar[bool] = True
    as_classifier: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not request_of(self.objective).values:
            raise ConfigError(
                f"{type(self.objective).__name__} trains no score: a reward model learns from values",
                keys=("objective",),
                fix="objective=reward",
            )

    def run(self, source: Composed) -> int:
        from automodel_cli.models.classifier import require_classifier
        from automodel_cli.models.source import whole_config
        from automodel_cli.run.held_out import HeldOutLoss, print_accuracy
        from automodel_cli.run.session import open_session

        require_classifier(whole_config(self.model))
        with open_session(self, source, columns=self.columns) as session:
            session.callbacks.add(HeldOutLoss(session))
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

    def columns(self, session: Session) -> Columns:
        """Nothing to add to the rows; what they must hold."""
        for rows in filter(None, (session.data.train, session.data.validation)):
            if rows.kind != "pairs":
                raise DataError(
                    "a reward model is trained on pairs of responses, the data holds single responses judged good or "
                    "bad",
                    keys=("data",),
                )
        if "margins_P" in self.objective.columns and not session.data.train.has_margins:
            raise DataError(
                "objective.margin=true, but no row of the data has a margin",
                keys=("objective.margin", "data.columns"),
                fix="objective.margin=false, or data.columns='{margin: <column>}'",
            )
        return lambda batches: batches
