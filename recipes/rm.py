"""Reward models: learn a score of complete conversations from pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.models.score_head import ScoreHead
from automodel_cli.objectives.base import request_of
from automodel_cli.recipes.preferences import PreferenceRecipe

if TYPE_CHECKING:
    from automodel_cli.config.composition.compose import Composed
    from automodel_cli.data.batch import Columns
    from automodel_cli.run.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class RMRecipe(PreferenceRecipe):
    """`PreferenceRecipe` for a model with a value head. Exports a sequence classifier."""

    kind: ClassVar[str] = "rm"

    @property
    def score_head(self) -> ScoreHead:
        return ScoreHead()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not request_of(self.objective).values:
            raise ConfigError(
                f"{type(self.objective).__name__} is not supported for reward models, because it does not "
                "train the score",
                code="not_supported",
                keys=("objective",),
                fix="objective=reward",
            )

    def run(self, source: Composed) -> int:
        from automodel_cli.models.checkpoint_io.sequence_classifier import require_classifier
        from automodel_cli.models.hub.source import composite_config

        require_classifier(composite_config(self.model), self.score_head)
        return super().run(source)

    def columns(self, session: Trainer) -> Columns:
        """Check the kind of the data. No columns are added."""
        for rows in filter(None, (session.data.train, session.data.validation)):
            if rows.kind != "pairs":
                raise DataError(
                    "a reward model requires pairs of responses, but the data contains single responses with labels",
                    code="wrong_data_kind",
                    keys=("data",),
                )
        if "margins_P" in self.objective.columns and not session.data.train.has_margins:
            raise DataError(
                "objective.margin=true requires margins, but no row has one",
                code="missing_key",
                keys=("objective.margin", "data.column_mapping"),
                fix="objective.margin=false, or data.column_mapping='{margin: <column>}'",
            )
        return lambda batches: batches
