"""Judging models: tasks on held-out rows, scores with intervals, comparisons of two models on the same questions."""
