"""Distributed training: device mesh, parallelism axes, data-parallel strategies and gradient reduction."""
