"""Embeddings: learn vectors of texts whose similarity tells which passage answers a query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_minimums
from automodel_cli.data.formats.base import DataKind
from automodel_cli.data.groups import GroupSpec
from automodel_cli.models.score_head import EmbeddingHead
from automodel_cli.objectives.embedding import EmbeddingObjective
from automodel_cli.recipes.scored import ScoredRecipe

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from automodel_cli.data.batch import Batch, Columns
    from automodel_cli.evaluation.held_out_retrieval import HeldOutRetrieval
    from automodel_cli.run.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class EmbeddingRecipe(ScoredRecipe):
    """Prepare, train and export an embedding model. Print its metrics on held-out rows before and after training."""

    query_prompt: str = ""
    """Text before every query, for example an instruction. The export stores it."""
    passage_prompt: str = ""
    """Text before every passage. The export stores it."""
    max_tokens: int | None = None
    """Truncate each text to this number of tokens. null: rows whose texts together exceed data.seq_len are left out."""

    kind: ClassVar[str] = "embedding"
    data_kind: ClassVar[DataKind] = "groups"

    @property
    def _embedding(self) -> EmbeddingObjective:
        assert isinstance(self.objective, EmbeddingObjective), "checked when the recipe was built"
        return self.objective

    @property
    def row_spec(self) -> GroupSpec:
        return GroupSpec(self.query_prompt, self.passage_prompt, self.max_tokens, self._embedding.scored)

    @property
    def score_head(self) -> EmbeddingHead:
        length = self.max_tokens or self.data.seq_len
        return EmbeddingHead(self._embedding.pooling, self.query_prompt, self.passage_prompt, length)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimums(self, max_tokens=1)
        if not isinstance(self.objective, EmbeddingObjective):
            raise ConfigError(
                f"{type(self.objective).__name__} is not supported for embeddings, because it reads no embeddings",
                code="not_supported",
                keys=("objective",),
                fix="objective=infonce, or objective=cosine_score",
            )
        if self.model.lora is not None and self.model.lora.dropout:
            raise ConfigError(
                f"model.lora.dropout={self.model.lora.dropout} is not supported for embeddings, because each text runs "
                "twice, and both passes must agree",
                code="unsupported_combination",
                keys=("model.lora.dropout",),
                fix="model.lora.dropout=0",
            )

    @property
    def packing_note(self) -> str | None:
        return "each text also runs a forward without gradients before the step, which is not counted"

    def check_model(self, hf_config: PretrainedConfig) -> None:
        """Raise ConfigError for Matryoshka sizes above the hidden size, and for dropout."""
        width = hf_config.get_text_config().hidden_size
        for size in self._embedding.dimensions:
            if size > width:
                raise ConfigError(
                    f"objective.dimensions has {size}, but the hidden size is {width}",
                    code="out_of_range",
                    keys=("objective.dimensions",),
                    fix=f"objective.dimensions=[{width}]",
                )

    def columns(self, session: Trainer) -> Columns:
        """Embed all texts of the step, and add the gradients of their embeddings. Collective."""
        from automodel_cli.run.embedding_gradients import with_gradients

        def measured(batches: list[Batch]) -> list[Batch]:
            return with_gradients(session.model.stages, batches, self._embedding, session.mesh)

        return measured

    def held_out(self, session: Trainer) -> HeldOutRetrieval:
        from automodel_cli.evaluation.held_out_retrieval import HeldOutRetrieval

        return HeldOutRetrieval(session, self._embedding)
