"""Fully sharded data parallelism and hybrid sharding, by torch."""
