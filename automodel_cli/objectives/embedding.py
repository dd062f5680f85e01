"""Embedding objectives: similarities of queries and passages of the whole step. Torch-free to import.

The loss of a query depends on the passages of all ranks and microbatches. So the embeddings of the step are computed
first, without gradients. `global_loss` returns the loss of each query and the gradient of every embedding, which
`__call__` then feeds into the backward of each microbatch (gradient cache, arXiv:2101.06983). Gradients are those of
one large batch, in every layout, and memory is that of a microbatch.

Shapes: S documents of a microbatch (padding included), N documents of the step, D hidden size.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_choice, check_range
from automodel_cli.data.head_output import HeadRequest
from automodel_cli.objectives.base import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from automodel_cli.data.batch import Batch
    from automodel_cli.data.head_output import HeadOutput

Pooling = Literal["last", "mean", "cls"]


class Documents(NamedTuple):
    """Documents of a step: embeddings `[N, D]`, role (0 query, 1 its passage, 2 negative), score, and a hash of the
    tokens, int64. The passage of a query is the next document."""

    pooled_ND: Tensor
    roles_N: Tensor
    scores_N: Tensor
    hashes_N: Tensor


class EmbeddingObjective:
    """Base of objectives on embeddings. Subclasses implement `query_losses`."""

    pooling: Pooling
    dimensions: list[int]

    @property
    @abstractmethod
    def scored(self) -> bool:
        """Whether rows are scored pairs."""

    @property
    def needs(self) -> HeadRequest:
        """See `RequestingObjective`."""
        return HeadRequest(hidden=True, logprobs=False)

    @property
    def columns(self) -> frozenset[str]:
        """Columns of `Batch.extra`. The recipe measures the last two at each step."""
        return frozenset({"roles_S", "scores_S", "query_losses_S", "pooled_gradients_SD"})

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """See `MeasuredObjective`."""
        return {"num_queries": Metric()}

    def measure(self, output: HeadOutput, batch: Batch) -> dict[str, Tensor]:
        """See `MeasuredObjective`."""
        return {"num_queries": self.weight(batch)}

    def weight(self, batch: Batch) -> Tensor:
        """Number of queries."""
        return (batch.extra["roles_S"] == 0).sum()

    def pooled(self, output: HeadOutput, batch: Batch) -> Tensor:
        """Return the fp32 embedding of each document, `[S, D]`, before normalization."""
        from automodel_cli.objectives.segment_reduce import mean_by_document

        assert output.hidden_BTD is not None, "embeddings need hidden states"
        hidden_TD = output.hidden_BTD.flatten(0, 1)
        if self.pooling == "last":
            return hidden_TD[batch.cu_seqlens[1:].long() - 1].float()
        return mean_by_document(hidden_TD.float(), batch)

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        """Return the losses of the queries of this batch. Its gradient is that of the step's loss."""
        # The loss compares documents of all ranks and microbatches. Two passes: the first embeds all documents and
        # computes the loss and its gradient dL/de for each embedding e. Here e * dL/de has this gradient (GradCache,
        # arXiv:2101.06983).
        given = (self.pooled(output, batch) * batch.extra["pooled_gradients_SD"]).sum()
        return batch.extra["query_losses_S"].sum() + given - given.detach()

    def global_loss(self, documents: Documents) -> tuple[Tensor, Tensor]:
        """Return the loss of each document, `[N]` (0 unless it is a query), and the gradient of their sum with respect
        to `pooled_ND`."""
        import torch

        with torch.enable_grad():
            leaf_ND = documents.pooled_ND.detach().requires_grad_()
            queries_Q = (documents.roles_N == 0).nonzero()[:, 0]
            losses_Q = self._mean_over_dimensions(documents._replace(pooled_ND=leaf_ND), queries_Q)
            (gradients_ND,) = torch.autograd.grad(losses_Q.sum(), leaf_ND)
        losses_N = torch.zeros_like(leaf_ND[:, 0]).index_put((queries_Q,), losses_Q)
        return losses_N.detach(), gradients_ND

    def _mean_over_dimensions(self, documents: Documents, queries_Q: Tensor) -> Tensor:
        """Return the loss of each query: the mean over the full embedding and its Matryoshka prefixes."""
        import torch
        from torch.nn.functional import normalize

        sizes = self.dimensions or [documents.pooled_ND.shape[1]]
        losses = [
            self.query_losses(documents._replace(pooled_ND=normalize(documents.pooled_ND[:, :size], dim=1)), queries_Q)
            for size in sizes
        ]
        return torch.stack(losses).mean(0)

    @abstractmethod
    def query_losses(self, documents: Documents, queries_Q: Tensor) -> Tensor:
        """Return the loss of each query. `documents.pooled_ND` is normalized."""


@dataclass(frozen=True, kw_only=True)
class InfoNCE(EmbeddingObjective):
    """Cross-entropy of a query's passage among all passages of the step (arXiv:1807.03748).

    The score of a passage is its cosine similarity / `temperature`. Candidates are the passages and hard negatives of
    all queries of the step, on all ranks. Other copies of the query's own passage are left out. The loss is the mean
    over queries.

    Example: similarities 0.9 and 0.8 and a temperature of 0.05 give scores 18 and 16, and a loss of
    log(1 + e^-2) = 0.127.
    """

    temperature: float = 0.05
    """Divisor of cosine similarities. Smaller values weigh the hardest negatives more."""
    pooling: Pooling = "last"
    """Embedding of a text: hidden state of its `last` token, or `mean` over its tokens. `cls` is rejected, because the
    first token of a causal model sees only itself."""
    dimensions: list[int] = field(default_factory=list)
    """Matryoshka: train these prefixes of the embedding too (arXiv:2205.13147), with equal weights. Include the full
    size. Empty: the full size only."""
    in_batch_negatives: bool = True
    """Compare with the passages of other queries. false: only with the hard negatives of the row."""

    @property
    def scored(self) -> bool:
        return False

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, above=0, fix="objective.temperature=0.05")
        check_pooling(self.pooling)
        check_dimensions(self.dimensions)

    def query_losses(self, documents: Documents, queries_Q: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        passages_C = (documents.roles_N > 0).nonzero()[:, 0]
        own_Q = queries_Q + 1  # the passage follows its query
        # [Q, D] x [D, C] -> [Q, C]: each query against all passages of the step.
        scores_QC = documents.pooled_ND[queries_Q] @ documents.pooled_ND[passages_C].T / self.temperature
        is_own_QC = passages_C == own_Q[:, None]
        # Another copy of the right passage would count as a wrong answer.
        copies_QC = (documents.hashes_N[passages_C] == documents.hashes_N[own_Q][:, None]) & ~is_own_QC
        left_out_QC = copies_QC
        if not self.in_batch_negatives:
            group_N = (documents.roles_N == 0).cumsum(0)
            left_out_QC = copies_QC | (group_N[passages_C] != group_N[queries_Q][:, None])
        scores_QC = scores_QC.masked_fill(left_out_QC, float("-inf"))
        return cross_entropy(scores_QC, is_own_QC.int().argmax(1), reduction="none")


@dataclass(frozen=True, kw_only=True)
class CosineScore(EmbeddingObjective):
    """Squared error between the cosine similarity of a pair and its `score` in the data. Mean over pairs."""

    pooling: Pooling = "last"
    """Embedding of a text: hidden state of its `last` token, or `mean` over its tokens. `cls` is rejected, because the
    first token of a causal model sees only itself."""
    dimensions: list[int] = field(default_factory=list)
    """Matryoshka: train these prefixes of the embedding too (arXiv:2205.13147), with equal weights. Include the full
    size. Empty: the full size only."""

    @property
    def scored(self) -> bool:
        return True

    def __post_init__(self) -> None:
        check_pooling(self.pooling)
        check_dimensions(self.dimensions)

    def query_losses(self, documents: Documents, queries_Q: Tensor) -> Tensor:
        cosines_Q = (documents.pooled_ND[queries_Q] * documents.pooled_ND[queries_Q + 1]).sum(1)
        return (cosines_Q - documents.scores_N[queries_Q]).square()


def check_pooling(pooling: str) -> None:
    """Raise ConfigError for an unknown pooling, and for the first token."""
    check_choice("pooling", pooling, ("last", "mean", "cls"), fix="objective.pooling=last")
    if pooling == "cls":
        raise ConfigError(
            "pooling=cls is not supported, because the first token of a causal model sees only itself",
            code="not_supported",
            keys=("pooling",),
            fix="objective.pooling=last, or objective.pooling=mean",
        )


def check_dimensions(dimensions: list[int]) -> None:
    """Raise ConfigError for sizes below 1."""
    for size in dimensions:
        check_range("dimensions", size, at_least=1, fix="objective.dimensions=[]")
