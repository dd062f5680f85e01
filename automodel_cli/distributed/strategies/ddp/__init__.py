"""Whole copies, gradients summed in buckets."""
