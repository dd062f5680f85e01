"""Classifiers: learn labels or numbers of texts, or a label of every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.formats.base import DataKind
from automodel_cli.data.labels import LabelSpec
from automodel_cli.evaluation.validation import check_tasks
from automodel_cli.models.score_head import ScoreHead
from automodel_cli.objectives.classification import Classification
from automodel_cli.run.recipe import Recipe

if TYPE_CHECKING:
    from automodel_cli.config.compose import Composed


@dataclass(frozen=True, kw_only=True)
class ClassifierRecipe(Recipe):
    """Prepare, train and export a classifier. Print its metrics on held-out rows before and after training."""

    kind: ClassVar[str] = "classifier"
    data_kind: ClassVar[DataKind] = "labeled"

    @property
    def _classification(self) -> Classification:
        assert isinstance(self.objective, Classification), "checked when the recipe was built"
        return self.objective

    @property
    def label_spec(self) -> LabelSpec:
        wanted = self._classification
        return LabelSpec(wanted.problem, tuple(wanted.labels), wanted.of_tokens)

    @property
    def score_head(self) -> ScoreHead:
        spec = self.label_spec
        return ScoreHead(spec.names, spec.problem, spec.of_tokens, plain_text=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tasks(self)
        if not isinstance(self.objective, Classification):
            raise ConfigError(
                f"{type(self.objective).__name__} is not supported for classifiers, because it reads no labels",
                code="not_supported",
                keys=("objective",),
                fix="objective=single_label, objective=multi_label, or objective=regression",
            )

    def run(self, source: Composed) -> int:
        from automodel_cli.evaluation.held_out_scores import HeldOutScores
        from automodel_cli.models.checkpoint_io.sequence_classifier import require_classifier
        from automodel_cli.models.hub.source import composite_config
        from automodel_cli.run.startup_summary import show_header
        from automodel_cli.run.trainer import build_trainer

        require_classifier(composite_config(self.model), self.score_head)
        with build_trainer(self, source) as session:
            scores = HeldOutScores(session, self._classification)
            session.callbacks.add(scores)
            show_header(session, scores.about())
            if session.first_step == 0:
                scores.show("before", 0)
            for step, batches in session.steps():
                session.train(step, batches)
            if session.stopped_by:
                return session.exit_code()
            scores.show("after", session.last_step)

            from automodel_cli.run.finalize import (
                finalize_run,  # later: the first step should not wait for the last page
            )

            return finalize_run(session)
