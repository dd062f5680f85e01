"""Fused elementwise regions, compiled to one kernel each."""
