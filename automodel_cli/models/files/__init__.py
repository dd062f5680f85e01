"""Checks and headers of the files of a model."""
