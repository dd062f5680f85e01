"""Training: the optimizer step, pipeline stages, optimizers, checkpoints, metrics and callbacks."""
