"""Training on scores of texts: base class of classifiers and embeddings."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from automodel_cli.evaluation.validation import check_tasks
from automodel_cli.run.recipe import Recipe

if TYPE_CHECKING:
    from automodel_cli.config.composition.compose import Composed
    from automodel_cli.evaluation.held_out_metrics import HeldOutMetrics
    from automodel_cli.run.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class ScoredRecipe(Recipe):
    """Prepare, train and export. Print the metrics on held-out rows before and after training."""

    @abstractmethod
    def held_out(self, session: Trainer) -> HeldOutMetrics:
        """Return the callback that measures held-out rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tasks(self)

    def run(self, source: Composed) -> int:
        from automodel_cli.models.checkpoint_io.sequence_classifier import require_exportable
        from automodel_cli.models.hub.source import composite_config
        from automodel_cli.run.build_trainer import build_trainer
        from automodel_cli.run.startup_summary import show_header

        assert self.score_head is not None, "every subclass has one"
        require_exportable(composite_config(self.model), self.score_head)
        with build_trainer(self, source) as session:
            measured = self.held_out(session)
            session.callbacks.add(measured)
            show_header(session, measured.about())
            if session.first_step == 0:
                measured.show("before", 0)
            for step, batches in session.steps():
                session.train(step, batches)
            if session.stopped_by:
                return session.exit_code()
            measured.show("after", session.last_step)

            from automodel_cli.run.finalize import (
                finalize_run,  # later: the first step should not wait for the last page
            )

            return finalize_run(session)
