"""Validation of configs before a run starts."""
