"""The optimizer step and everything around it: stages, optimizers, checkpoints, meter."""
