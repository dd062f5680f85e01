"""Distributed data parallelism: replicated parameters, gradients summed in buckets."""
