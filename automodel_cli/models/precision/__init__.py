"""Weights and products in other precisions than the model's own."""
