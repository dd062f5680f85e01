"""Packed attention for transformers models: kernels, kernel selection and context parallelism."""
