"""Metrics of a run: accumulation, FLOPs and memory estimates, progress line and metrics file."""
