"""Metrics and checks of rollouts: rewards, environments, log-prob agreement, accuracy and warnings."""
