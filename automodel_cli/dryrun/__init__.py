"""Dry run: execute the training step of a config on fake CUDA tensors and measure memory and communication."""
