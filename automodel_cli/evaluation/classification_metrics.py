"""Metrics of classifiers from scores and targets, in numpy. The same values as scikit-learn's.

Shapes: N examples, L labels.
"""

from __future__ import annotations

import numpy as np

from automodel_cli.objectives.classification import Problem


def classification_metrics(problem: Problem, scores_NL: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    """Return the metrics of a problem by name.

    Single label: `accuracy`, macro `f1`, `auroc` (of the second of two classes, else the mean of one class against the
    rest). Multi label: `accuracy` of all labels of an example, macro and micro F1, macro `auroc`. Regression: `mae`,
    `pearson` and `spearman`, means over the numbers. A metric that is undefined, such as the AUROC of one class, is
    left out.

    Args:
        scores_NL: logits, or predicted numbers.
        targets: class indices `[N]`, 0 and 1 `[N, L]`, or numbers `[N, L]`.
    """
    scores_NL = scores_NL.astype(np.float64)
    if problem == "regression":
        found = _of_numbers(scores_NL, targets.astype(np.float64))
    elif problem == "single_label_classification":
        found = _of_classes(scores_NL, targets)
    else:
        found = _of_labels(scores_NL, targets > 0.5)
    return {name: value for name, value in found.items() if np.isfinite(value)}


def _of_classes(scores_NL: np.ndarray, targets_N: np.ndarray) -> dict[str, float]:
    predicted_N = scores_NL.argmax(1)
    present = np.union1d(targets_N, predicted_N)  # as scikit-learn, classes that occur nowhere do not count
    f1 = np.mean([f1_score(predicted_N == c, targets_N == c) for c in present])
    probabilities_NL = np.exp(scores_NL - scores_NL.max(1, keepdims=True))
    probabilities_NL /= probabilities_NL.sum(1, keepdims=True)
    classes = [1] if scores_NL.shape[1] == 2 else range(scores_NL.shape[1])
    areas = [auroc(probabilities_NL[:, c], targets_N == c) for c in classes]
    return {"accuracy": float((predicted_N == targets_N).mean()), "f1": float(f1), "auroc": float(np.mean(areas))}


def _of_labels(scores_NL: np.ndarray, targets_NL: np.ndarray) -> dict[str, float]:
    predicted_NL = scores_NL > 0
    columns = range(scores_NL.shape[1])
    return {
        "accuracy": float((predicted_NL == targets_NL).all(1).mean()),
        "f1": float(np.mean([f1_score(predicted_NL[:, c], targets_NL[:, c]) for c in columns])),
        "f1_micro": f1_score(predicted_NL.ravel(), targets_NL.ravel()),
        "auroc": float(np.mean([auroc(scores_NL[:, c], targets_NL[:, c]) for c in columns])),
    }


def _of_numbers(scores_NL: np.ndarray, targets_NL: np.ndarray) -> dict[str, float]:
    columns = list(zip(scores_NL.T, targets_NL.T, strict=True))
    return {
        "mae": float(np.abs(scores_NL - targets_NL).mean()),
        "pearson": float(np.mean([correlation(a, b) for a, b in columns])),
        "spearman": float(np.mean([correlation(ranks(a), ranks(b)) for a, b in columns])),
    }


def f1_score(predicted_N: np.ndarray, actual_N: np.ndarray) -> float:
    """Return 2 x hits / (predicted + actual), and 0 without either."""
    total = int(predicted_N.sum()) + int(actual_N.sum())
    return 2 * int((predicted_N & actual_N).sum()) / total if total else 0.0


def auroc(scores_N: np.ndarray, actual_N: np.ndarray) -> float:
    """Return the probability that a positive example has a higher score than a negative one. Ties count half.

    NaN without examples of both kinds. It is the rank-sum statistic of Mann and Whitney.
    """
    positive = int(actual_N.sum())
    negative = len(actual_N) - positive
    if not positive or not negative:
        return float("nan")
    rank_sum = ranks(scores_N)[actual_N].sum()
    return float((rank_sum - positive * (positive + 1) / 2) / (positive * negative))


def ranks(values_N: np.ndarray) -> np.ndarray:
    """Return ranks from 1, with the mean rank for equal values."""
    _, inverse, counts = np.unique(values_N, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    result: np.ndarray = (last - (counts - 1) / 2)[inverse]
    return result


def correlation(a_N: np.ndarray, b_N: np.ndarray) -> float:
    """Return Pearson's correlation. NaN if one side is constant."""
    a_N, b_N = a_N - a_N.mean(), b_N - b_N.mean()
    size = np.sqrt((a_N**2).sum() * (b_N**2).sum())
    return float((a_N * b_N).sum() / size) if size > 0 else float("nan")
