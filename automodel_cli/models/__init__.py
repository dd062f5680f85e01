"""Hugging Face models as they are: build, load, attend, score, adapt, export."""
