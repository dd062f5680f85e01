"""Recall and nDCG of held-out queries: scikit-learn's nDCG, and ties that count against the query."""

from __future__ import annotations

import numpy as np
import pytest

from automodel_cli.evaluation.held_out_retrieval import retrieval_metrics


def test_metrics_are_those_of_their_definitions():
    sklearn = pytest.importorskip("sklearn.metrics")  # of the extra `dev`
    rng = np.random.default_rng(0)
    scores_QC, right = rng.normal(size=(20, 30)), rng.integers(0, 30, 20)
    is_right_QC = np.arange(30) == right[:, None]
    found = retrieval_metrics(scores_QC, is_right_QC)
    assert found["ndcg_at_10"] == pytest.approx(sklearn.ndcg_score(is_right_QC, scores_QC, k=10))
    for k in (1, 10):
        assert found[f"recall_at_{k}"] == pytest.approx(
            sklearn.top_k_accuracy_score(right, scores_QC, k=k, labels=range(30))
        )
    assert found["mrr"] == pytest.approx(sklearn.label_ranking_average_precision_score(is_right_QC, scores_QC))


def test_equal_scores_are_no_hit():
    tied = retrieval_metrics(np.zeros((1, 4)), np.array([[True, False, False, False]]))
    assert tied["recall_at_1"] == 0 and tied["recall_at_10"] == 1 and tied["mrr"] == 0.25
