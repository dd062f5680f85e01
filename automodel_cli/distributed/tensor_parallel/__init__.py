"""Tensor and sequence parallelism: plans of Hugging Face models, styles and their application."""
