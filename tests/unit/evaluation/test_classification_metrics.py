"""Metrics of classifiers: scikit-learn's and SciPy's numbers, ties and absent classes included."""

from __future__ import annotations

import numpy as np
import pytest

from automodel_cli.evaluation.classification_metrics import auroc, classification_metrics, ranks

sklearn = pytest.importorskip("sklearn.metrics")  # of the extra `dev`
SINGLE, MULTI = "single_label_classification", "multi_label_classification"


def examples(seed: int, labels: int, count: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Scores and classes."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(count, labels)), rng.integers(0, labels, count)


def probabilities(scores_NL: np.ndarray) -> np.ndarray:
    exact = np.exp(scores_NL)
    return exact / exact.sum(1, keepdims=True)


@pytest.mark.parametrize("labels", [2, 4])
def test_single_label(labels):
    scores_NL, targets_N = examples(labels, labels)
    found = classification_metrics(SINGLE, scores_NL, targets_N)
    predicted_N = scores_NL.argmax(1)
    assert found["accuracy"] == pytest.approx(sklearn.accuracy_score(targets_N, predicted_N))
    assert found["f1"] == pytest.approx(sklearn.f1_score(targets_N, predicted_N, average="macro"))
    given = probabilities(scores_NL)
    expected = sklearn.roc_auc_score(targets_N, given[:, 1] if labels == 2 else given, multi_class="ovr")
    assert found["auroc"] == pytest.approx(expected)


def test_multi_label():
    scores_NL = np.round(examples(0, 3)[0], 1)  # with ties
    targets_NL = (examples(1, 3)[0] > 0.3).astype(np.float32)
    found = classification_metrics(MULTI, scores_NL, targets_NL)
    predicted_NL = scores_NL > 0
    assert found["accuracy"] == pytest.approx(sklearn.accuracy_score(targets_NL, predicted_NL))
    for name, average in (("f1", "macro"), ("f1_micro", "micro")):
        assert found[name] == pytest.approx(sklearn.f1_score(targets_NL, predicted_NL, average=average))
    assert found["auroc"] == pytest.approx(sklearn.roc_auc_score(targets_NL, scores_NL))


def test_regression():
    from scipy import stats

    scores_NL, targets_NL = np.round(examples(0, 1)[0], 1), examples(1, 1)[0]
    found = classification_metrics("regression", scores_NL, targets_NL)
    assert found["mae"] == pytest.approx(sklearn.mean_absolute_error(targets_NL, scores_NL))
    assert found["pearson"] == pytest.approx(stats.pearsonr(scores_NL[:, 0], targets_NL[:, 0]).statistic)
    assert found["spearman"] == pytest.approx(stats.spearmanr(scores_NL[:, 0], targets_NL[:, 0]).statistic)


def test_what_is_undefined_is_left_out():
    scores_NL, _ = examples(0, 2)
    one_class = classification_metrics(SINGLE, scores_NL, np.zeros(60, int))
    assert "auroc" not in one_class and "accuracy" in one_class
    assert classification_metrics("regression", scores_NL, np.zeros((60, 2))).keys() == {"mae"}
    assert auroc(np.array([1.0, 1.0]), np.array([True, False])) == 0.5
    assert ranks(np.array([3.0, 1.0, 3.0])).tolist() == [2.5, 1, 2.5]
