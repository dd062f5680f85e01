"""Evaluation: tasks on held-out rows, scores with confidence intervals, paired comparison of models."""
