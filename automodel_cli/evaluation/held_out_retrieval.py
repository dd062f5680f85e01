"""Validation of embeddings: retrieval among all held-out passages, or correlation with scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch.nn.functional import normalize

from automodel_cli.evaluation.classification_metrics import correlation, ranks
from automodel_cli.evaluation.held_out_metrics import HeldOutMetrics
from automodel_cli.run.embedding_gradients import embed
from automodel_cli.training.callback import Run

if TYPE_CHECKING:
    from automodel_cli.objectives.embedding import Documents, EmbeddingObjective
    from automodel_cli.run.trainer import Trainer

CUTOFFS = (1, 10)


class HeldOutRetrieval(HeldOutMetrics):
    """`val_loss` and metrics of the held-out rows as one batch. Candidates are all their passages and negatives."""

    shown: ClassVar[Mapping[str, str]] = {
        "recall_at_1": "recall@1",
        "recall_at_10": "recall@10",
        "ndcg_at_10": "nDCG@10",
        "spearman": "Spearman",
    }
    unit: ClassVar[tuple[str, str]] = ("num_queries", "held-out queries")

    def __init__(self, session: Trainer, objective: EmbeddingObjective):
        super().__init__(session)
        self._objective = objective

    def on_validation(self, run: Run, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Collective."""
        session, objective = self._session, self._objective
        if session.data.validation is None:
            return {}
        documents = embed(session.model.stages, self.batches(), objective, session.mesh).documents
        losses_N, _ = objective.global_loss(documents)
        number = int((documents.roles_N == 0).sum())
        found = _of_scores(documents) if objective.scored else _of_retrieval(documents)
        found |= {"loss": losses_N.sum().item() / number, "num_queries": float(number)}
        return {f"val_{name}": value for name, value in found.items()}


def _of_retrieval(documents: Documents) -> dict[str, float]:
    """Return recall and nDCG. Equal passages count once, and all copies of the right passage are right."""
    embeddings_ND = normalize(documents.pooled_ND.double(), dim=1)
    queries_Q = (documents.roles_N == 0).nonzero()[:, 0]
    passages = (documents.roles_N > 0).nonzero()[:, 0]
    hashes = documents.hashes_N[passages].cpu().numpy()
    _, distinct = np.unique(hashes, return_index=True)
    passages_C = passages[torch.from_numpy(np.sort(distinct)).to(passages.device)]
    scores_QC = embeddings_ND[queries_Q] @ embeddings_ND[passages_C].T
    is_right_QC = documents.hashes_N[passages_C] == documents.hashes_N[queries_Q + 1][:, None]
    return retrieval_metrics(scores_QC.cpu().numpy(), is_right_QC.cpu().numpy())


def retrieval_metrics(scores_QC: np.ndarray, is_right_QC: np.ndarray) -> dict[str, float]:
    """Return mean recall and nDCG at `CUTOFFS` of queries with one right passage each. Ties count against the query."""
    right_Q = np.where(is_right_QC, scores_QC, -np.inf).max(1)
    ahead_Q = ((scores_QC >= right_Q[:, None]) & ~is_right_QC).sum(1)  # the rank of the right passage, from 0
    found: dict[str, float] = {}
    for k in CUTOFFS:
        found[f"recall_at_{k}"] = float((ahead_Q < k).mean())
    found["ndcg_at_10"] = float(np.where(ahead_Q < 10, 1 / np.log2(ahead_Q + 2), 0.0).mean())
    found["mrr"] = float((1 / (ahead_Q + 1)).mean())
    return found


def _of_scores(documents: Documents) -> dict[str, float]:
    embeddings_ND = normalize(documents.pooled_ND.double(), dim=1)
    queries_Q = (documents.roles_N == 0).nonzero()[:, 0]
    cosines_Q = (embeddings_ND[queries_Q] * embeddings_ND[queries_Q + 1]).sum(1).cpu().numpy()
    scores_Q = documents.scores_N[queries_Q].cpu().double().numpy()
    found = {"pearson": correlation(cosines_Q, scores_Q), "spearman": correlation(ranks(cosines_Q), ranks(scores_Q))}
    return {name: value for name, value in found.items() if np.isfinite(value)}
