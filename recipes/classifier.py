"""Classifiers: learn labels or numbers of texts, or a label of every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.formats.base import DataKind
from automodel_cli.data.labels import LabelSpec
from automodel_cli.models.score_head import ScoreHead
from automodel_cli.objectives.classification import Classification
from automodel_cli.recipes.scored import ScoredRecipe

if TYPE_CHECKING:
    from automodel_cli.evaluation.held_out_scores import HeldOutScores
    from automodel_cli.run.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class ClassifierRecipe(ScoredRecipe):
    """Prepare, train and export a classifier. Print its metrics on held-out rows before and after training."""

    kind: ClassVar[str] = "classifier"
    data_kind: ClassVar[DataKind] = "labeled"

    @property
    def _classification(self) -> Classification:
        assert isinstance(self.objective, Classification), "checked when the recipe was built"
        return self.objective

    @property
    def row_spec(self) -> LabelSpec:
        wanted = self._classification
        return LabelSpec(wanted.problem, tuple(wanted.labels), wanted.of_tokens)

    @property
    def score_head(self) -> ScoreHead:
        spec = self.row_spec
        return ScoreHead(spec.names, spec.problem, spec.of_tokens, plain_text=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.objective, Classification):
            raise ConfigError(
                f"{type(self.objective).__name__} is not supported for classifiers, because it reads no labels",
                code="not_supported",
                keys=("objective",),
                fix="objective=single_label, objective=multi_label, or objective=regression",
            )

    def held_out(self, session: Trainer) -> HeldOutScores:
        from automodel_cli.evaluation.held_out_scores import HeldOutScores

        return HeldOutScores(session, self._classification)
