"""Fully sharded data parallelism (FSDP2) and hybrid sharding of torch."""
